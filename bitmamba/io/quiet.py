"""One line instead of Orbax's pages: its errors reach us as exceptions anyway.

When a save fails, Orbax logs each traceback several times, leaves tasks behind that
asyncio complains of, and TensorStore calls back into loops that are closed by then.
"""

import logging
import sys
import traceback
from typing import Any


def silence_orbax() -> None:
    """Drop exactly those messages, in this process, from now on."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _is_ours not in logger.filters:
            logger.addFilter(_is_ours)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def _is_ours(record: logging.LogRecord) -> bool:
    """False for a log line of Orbax, or one about a task that Orbax left behind."""
    if "/orbax/" in record.pathname.replace("\\", "/"):
        return False
    if record.name != "asyncio" or not record.exc_info:
        return True
    _, error, trace = record.exc_info
    files = [frame.filename for frame in traceback.extract_tb(trace)]
    return "OCDBT" not in str(error) and not any("orbax" in file for file in files)


class _Hook:
    """An unraisable hook that passes on all but a call into a closed event loop."""

    def __init__(self, following: Any):
        self._following = following

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        is_late_call = (
            isinstance(error, RuntimeError)
            and str(error) == "Event loop is closed"
            and unraisable.object is None
        )
        if not is_late_call:
            self._following(unraisable)
