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
    """Gives a sign every few seconds, and looks for those of the others.

    A process that is lost leaves the others waiting in a collective for ever. When its
    last sign is `lost_s` old, each of them says so in one line and leaves with code 1;
    what is on the disk is whole. Process 0 keeps the signs: if it does not answer, it
    is the one that is missed. See `relay.py` for one that is gone.
    """

    def __init__(self, peers: Peers, lost_s: float, workdir: str | Path) -> None:
        self._peers, self._lost_s, self._workdir = peers, lost_s, Path(workdir)
        self._over = threading.Event()
        now = time.monotonic()
        self._signs = {i: ("", now) for i in range(peers.count)}

    def start(self) -> None:
        """Begin; only with others is there anything to look for."""
        if self._peers.count > 1:
            for work in (self._exchange, self._look):
                threading.Thread(target=work, daemon=True).start()

    def stop(self) -> None:
        """The run is over."""
        self._over.set()

    def _exchange(self) -> None:
        """Waits for process 0, so it is not what looks at the clock."""
        number = 0
        while not self._over.wait(self._lost_s / 6):
            number += 1
            with contextlib.suppress(Exception):  # no connection
                self._peers.give_sign(f"{number} {socket.gethostname()}")
                self.see(self._peers.signs(), time.monotonic())

    def _look(self) -> None:
        while not self._over.wait(self._lost_s / 6):
            if (lost := self.missing(time.monotonic())) is not None:
                host = self._signs[lost][0].partition(" ")[2]
                how = (
                    f"has given no sign for {self._lost_s:g} s "
                    "(config.distributed.lost_s)"
                )
                leave(lost, self._peers.count, how, workdir=self._workdir, host=host)

    def see(self, found: dict[int, str], now: float) -> None:
        """Take in the signs as they are now."""
        for i, (sign, _) in self._signs.items():
            if found.get(i, sign) != sign:
                self._signs[i] = (found[i], now)

    def missing(self, now: float) -> int | None:
        """The process whose last new sign is too old, if there is one.

        Without process 0 nobody's signs are seen: it comes first.
        """
        for i, (_, since) in self._signs.items():
            if now - since > self._lost_s and i != self._peers.index:
                return i
        return None


def leave(lost: int, of: int, how: str, *, workdir: str | Path, host: str = "") -> None:
    """Say which process is lost and what is kept, and end this one."""
    line = lost_line(lost, of, how, workdir=workdir, host=host)
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.__stderr__, flush=True)
    os._exit(FAILED)


def lost_line(
    lost: int, of: int, how: str, *, workdir: str | Path, host: str = ""
) -> str:
    """The one line about it."""
    folder = Path(workdir) / "checkpoints"
    good = next(iter(step_folders(folder)), None) if folder.is_dir() else None
    kept = "nothing was saved yet" if good is None else f"step {good} is saved"
    where = f" ({host})" if host else ""
    return (
        f"error: process {lost} of {of}{where} {how}; {kept}; start all processes "
        "again with the same command"
    )
