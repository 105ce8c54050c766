"""SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, leave; a second one is final.

Of several processes each has its own; `distributed.AgreedStop` makes them one. JAX's
notice of SIGTERM would not see the other signals, and is off.
"""

import contextlib
import os
import signal
import socket
import threading
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """A context in which the first signal only sets `received`; one context at a time.

    A thread sees the signals too, so that leaving at once does not wait for compiled
    code, in which Python's handlers do not run.

    received: name of the signal, or None.
    """

    def __init__(self, *, at_once: int | None = None) -> None:
        """at_once: leave with this exit code at the first one: nothing is to be saved.

        None waits for whoever reads `received`, and leaves at a second signal, with
        128 + its number.
        """
        self.received: str | None = None
        self._at_once = at_once
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(
            self._write.fileno(), warn_on_full_buffer=False
        )
        threading.Thread(target=self._watch, args=(self._read,), daemon=True).start()
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_fd)
        self._write.close()  # ends the thread

    def post(self) -> None:
        """Nothing: alone, whoever reads `received` need not agree with others."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name

    def _watch(self, read: socket.socket) -> None:
        seen = 0
        with read:
            while numbers := read.recv(16):
                for number in numbers:
                    if number not in _SIGNALS:
                        continue
                    seen += 1
                    if self._at_once is not None:
                        name = signal.Signals(number).name
                        _leave(f"{name}: left before the first step", self._at_once)
                    if seen > 1:
                        _leave("second signal: left at once", 128 + number)


def _leave(line: str, code: int) -> None:
    """End the process here and now; what is on the disk is whole."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())
    os._exit(code)
