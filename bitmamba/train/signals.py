"""SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, leave; a second one is final."""

import os
import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """A context in which the first signal only sets `received`.

    received: name of the signal, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
