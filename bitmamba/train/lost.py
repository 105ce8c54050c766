"""A lookout for the other processes: one that gives no sign is told, and all end."""

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from bitmamba.command_line import FAILED
from bitmamba.io.peers import Peers
from bitmamba.io.steps import step_folders


class Lookout:
    """A thread that gives a sign every few seconds, and looks for those of the others.

    A process that is lost leaves the others waiting in a collective for ever. When its
    last sign is `lost_s` old, each of them says so in one line and leaves with code 1;
    what is on the disk is whole. Process 0 keeps the signs: when it is lost, JAX ends
    the others at once, with words of its own.
    """

    def __init__(self, peers: Peers, lost_s: float, workdir: str | Path) -> None:
        self._peers, self._lost_s, self._workdir = peers, lost_s, Path(workdir)
        self._over = threading.Event()
        self._signs: dict[int, tuple[str, float]] = {}

    def start(self) -> None:
        """Begin; only with others is there anything to look for."""
        if self._peers.count > 1:
            threading.Thread(target=self._look, daemon=True).start()

    def stop(self) -> None:
        """The run is over."""
        self._over.set()

    def _look(self) -> None:
        number = 0
        now = time.monotonic()
        self._signs = {i: ("", now) for i in range(self._peers.count)}
        while not self._over.wait(self._lost_s / 6):
            number += 1
            try:
                self._peers.give_sign(f"{number} {socket.gethostname()}")
                seen = self._peers.signs()
            except Exception:  # no connection: process 0 is missed with its signs
                seen = {}
            if (lost := self.missing(seen, time.monotonic())) is not None:
                self._end(lost)

    def missing(self, seen: dict[int, str], now: float) -> int | None:
        """The process whose last new sign is too old, if there is one."""
        for i, (sign, since) in self._signs.items():
            if seen.get(i, sign) != sign:
                self._signs[i] = (seen[i], now)
            elif now - since > self._lost_s and i != self._peers.index:
                return i
        return None

    def _end(self, lost: int) -> None:
        host = self._signs[lost][0].partition(" ")[2]
        with contextlib.suppress(OSError, ValueError):
            print(self._line(lost, host), file=sys.__stderr__, flush=True)
        os._exit(FAILED)

    def _line(self, lost: int, host: str) -> str:
        folder = self._workdir / "checkpoints"
        good = next(iter(step_folders(folder)), None) if folder.is_dir() else None
        kept = "nothing was saved yet" if good is None else f"step {good} is saved"
        where = f" ({host})" if host else ""
        return (
            f"error: process {lost} of {self._peers.count}{where} has given no sign "
            f"for {self._lost_s:g} s (config.distributed.lost_s); {kept}; start all "
            "processes again with the same command"
        )
