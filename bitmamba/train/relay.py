"""This process's way to process 0, which tells when process 0 is gone.

JAX ends a process at once, with pages of C++ and code 134, when its connection to
process 0 closes; neither its settings nor its callback let Python speak first. So JAX
is connected to this relay, which keeps JAX's side open when the other one closes.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_BYTES = 1 << 16
_CONNECT_S = 5.0
_RETRY_S = 0.2


class Relay:
    """Passes bytes between a port of this machine and process 0, both ways.

    address: "127.0.0.1:port", for JAX instead of process 0's own.
    """

    def __init__(self, coordinator: str) -> None:
        host, _, port = coordinator.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._on_lost: Callable[[], None] | None = None
        self._parting = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def watch(self, on_lost: Callable[[], None]) -> None:
        """All have met: from now on a connection that ends is never made anew by JAX.

        on_lost: called from a thread, while JAX still waits; it should not return.
        """
        self._on_lost = on_lost

    def part(self) -> None:
        """From now on process 0 may go: the run is over."""
        self._parting = True
        # Wakes the thread that waits for JAX to connect again.
        _shut(self._listener)

    def _serve(self) -> None:
        """One connection after another: JAX has one, and nobody else is let in."""
        with self._listener:
            while not self._parting:
                try:
                    near, _ = self._listener.accept()
                except OSError:
                    return
                with near:
                    far = self._reach()
                    if far is not None:
                        with far:
                            self._pass_on(near, far)

    def _reach(self) -> socket.socket | None:
        """Process 0, which may start later than this one; JAX has a time-out."""
        end = time.monotonic() + 3 * _CONNECT_S
        while time.monotonic() < end and not self._parting:
            try:
                return self._connect()
            except OSError:
                time.sleep(_RETRY_S)
        return None

    def _connect(self) -> socket.socket:
        far = socket.create_connection(self._target, timeout=_CONNECT_S)
        far.settimeout(None)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return far

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        """Until JAX closes its side, or process 0 does."""
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        closed_by_jax = threading.Event()

        def back() -> None:
            if _pump(near, far):
                closed_by_jax.set()
            _shut(far)

        thread = threading.Thread(target=back, daemon=True)
        thread.start()
        far_ended = _pump(far, near)
        is_lost = far_ended and not closed_by_jax.is_set() and not self._parting
        if is_lost and self._on_lost:
            self._on_lost()
        _shut(near)
        thread.join()


def _pump(source: socket.socket, sink: socket.socket) -> bool:
    """Copy until one of the two ends; whether that was the source."""
    while True:
        try:
            data = source.recv(_BYTES)
        except OSError:
            return True
        if not data:
            return True
        try:
            sink.sendall(data)
        except OSError:
            return False


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
