"""metrics.jsonl: one JSON object a line, each with `step`."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from bitmamba.io.workdir import check_links


class MetricsWriter:
    """Appends rows to `<workdir>/metrics.jsonl`, each on disk's side before return.

    Rows are valid JSON: a number that is not finite is written as null and named in
    the row's `non_finite`, as {"loss": "nan"}. When the disk is full, rows wait in
    memory and are written once there is room.
    """

    def __init__(self, workdir: str | Path, *, resume_step: int | None = None):
        """Open the file, cut back to the step that training resumes from.

        Args:
            workdir: made if needed.
            resume_step: rows with a later step are removed, as is a last row that
                was cut by a kill; all others stay byte for byte. None removes all.

        Raises:
            ValueError: a link in the work directory leads out of it.
        """
        self.path = Path(workdir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_links(workdir)
        _cut_back(self.path, resume_step)
        self._file = self.path.open("ab", buffering=0)
        self._end = self.path.stat().st_size
        self._waiting = b""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one row; values are JSON-able, or numpy or jax scalars.

        Raises:
            ValueError: a value is not a number, text, flag, list or None.
        """
        row = {"step": int(step)}
        non_finite = {}
        for name, value in values.items():
            row[name] = _plain(name, value)
            if isinstance(row[name], float) and not math.isfinite(row[name]):
                non_finite[name], row[name] = str(row[name]), None
        if non_finite:
            row["non_finite"] = non_finite
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        self._waiting += line.encode() + b"\n"
        try:
            self._drain()
        except OSError as error:
            logging.log_every_n_seconds(
                logging.WARNING, "%s: %s; rows wait in memory", 60, self.path, error
            )

    def close(self) -> None:
        """Write what waits, and close.

        Raises:
            OSError: rows are left that could not be written.
        """
        try:
            self._drain()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _drain(self) -> None:
        """Write waiting rows; on failure the file ends with a whole row again."""
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)
            raise
        self._end += len(self._waiting)
        self._waiting = b""


class NoWriter:
    """What a process has that writes no metrics: one of several does."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _plain(name: str, value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float | list):
        return value
    raise ValueError(
        f"metrics: {name}: got {type(value).__name__}; expected a number, text, flag, "
        "list or None"
    )


def _cut_back(path: Path, resume_step: int | None) -> None:
    """Rewrite the file without later rows; untouched when none is later."""
    if not path.exists():
        return
    before = path.read_bytes()
    lines = before.splitlines(keepends=True) if resume_step is not None else []
    after = b"".join(line for line in lines if _stays(line, resume_step))
    if after == before:
        return
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("wb") as file:
        file.write(after)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _stays(line: bytes, resume_step: int | None) -> bool:
    """Whole rows up to the step; a line we cannot read is not ours to remove."""
    if not line.endswith(b"\n"):
        return False
    try:
        return json.loads(line)["step"] <= resume_step
    except (ValueError, KeyError, TypeError):
        return True
