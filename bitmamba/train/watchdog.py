"""A step that does not end: the stacks of all threads, and out."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from bitmamba.command_line import FAILED

_GRACE_S = 10.0


class Watchdog:
    """A context that ends the process when nobody calls `beat` for `seconds`.

    It writes the stacks of all threads to stderr and to `<workdir>/stuck.txt`, and
    leaves with exit code 1. Should the interpreter itself be stuck (compiled code that
    keeps its lock), a timer in C does the same a little later, to stderr alone.
    """

    def __init__(self, seconds: float, workdir: str | Path) -> None:
        """seconds: 0 watches nothing."""
        self._seconds, self._workdir = seconds, Path(workdir)
        self._last, self._what = time.monotonic(), "start"
        self._over = threading.Event()

    def beat(self, what: str) -> None:
        """Something was done; `what` begins now."""
        self._last, self._what = time.monotonic(), what

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            self.beat(self._what)
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            left = self._last + self._seconds - time.monotonic()
            if left <= 0:
                self._end()
            # Armed anew by this thread, so that it fires only if the thread cannot run.
            faulthandler.dump_traceback_later(
                left + _GRACE_S, exit=True, file=sys.__stderr__
            )
            if self._over.wait(left):
                faulthandler.cancel_dump_traceback_later()
                return

    def _end(self) -> None:
        path = self._workdir / "stuck.txt"
        line = (
            f"error: stuck for {self._seconds:g} s in {self._what} "
            f"(config.guard.stuck_s); stacks of all threads follow, and are in {path}"
        )
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            with path.open("w") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
        os._exit(FAILED)
