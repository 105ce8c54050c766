"""Several processes of one run: how they meet, stop together, and miss one another.

Started before JAX looks at its devices. JAX's notice of SIGTERM is off: it does not see
SIGUSR1 and Ctrl-C, and a handler of ours would silence it. The processes agree on our
own flag instead.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.command_line import FAILED, MISTAKE
from bitmamba.config import Config
from bitmamba.io.peers import of_jax
from bitmamba.train.cluster import Place, find_place
from bitmamba.train.layout import Layout
from bitmamba.train.lost import Lookout, leave
from bitmamba.train.relay import Relay
from bitmamba.train.signals import StopSignal

_ALL_RAISE_S = 8  # what all find wrong they find about together

_lookouts: list[Lookout] = []
_relays: list[Relay] = []


def start(config: Config) -> None:
    """Meet the other processes, if there are any, and watch for their signs.

    Raises:
        ValueError: settings or environment do not say who belongs to the run, or the
            address cannot be used. If the others do not come in time, one line says so
            and the process ends with code 1.
    """
    place = find_place(config.distributed, os.environ)
    if place is None:
        return
    cfg = config.distributed
    # Without GPU or TPU, XLA's own collectives know one process only.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    # JAX would abort on its own time-out, without a word on what to do.
    late = threading.Timer(cfg.start_timeout_s, _not_met, [place, cfg.start_timeout_s])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            _way_to_first(place),
            num_processes=place.processes,
            process_id=place.process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=cfg.start_timeout_s + 60,
            # Ours come first, with a line that people understand: JAX gives up on
            # process 0 after half of this, we after lost_s and a third.
            heartbeat_timeout_seconds=round(4 * cfg.lost_s) + 10,
            shutdown_timeout_seconds=30,
            coordinator_bind_address=cfg.bind or place.coordinator,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"config.distributed.coordinator: {place.coordinator}: {reason}; expected "
            "an address of process 0 with a free port; see config.distributed.bind"
        ) from None
    finally:
        late.cancel()
    if _relays:
        how = f"is gone: its connection at {place.coordinator} ended"
        gone = partial(leave, 0, place.processes, how, workdir=config.workdir)
        _relays[-1].watch(gone)
    _lookouts.append(Lookout(of_jax(), cfg.lost_s, config.workdir))
    _lookouts[-1].start()


def _way_to_first(place: Place) -> str:
    """The address that JAX is given: process 0's own, or that of a relay to it."""
    # Certificates are of process 0's own name.
    has_names = getattr(jax.config, "jax_mtls_cert_file", None)
    if place.process_id == 0 or has_names:
        return place.coordinator

    # gRPC would ask the proxy of the environment for this machine's own port.
    name = "no_grpc_proxy" if "no_grpc_proxy" in os.environ else "no_proxy"
    os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1".lstrip(",")
    _relays.append(Relay(place.coordinator))
    return _relays[-1].address


def _not_met(place: Place, timeout_s: int) -> None:
    """End this process: not all came."""
    host, _, port = place.coordinator.rpartition(":")
    missing = "another process has not come"
    if place.process_id != 0:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        except OSError as error:
            missing = f"process 0 does not answer there ({error})"
    line = (
        f"error: process {place.process_id} of {place.processes} "
        f"({socket.gethostname()}) waited {timeout_s} s at {place.coordinator}: "
        f"{missing}; start all processes, or raise config.distributed.start_timeout_s"
    )
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.__stderr__, flush=True)
    os._exit(FAILED)


def finish() -> None:
    """Part from the others at the end of a run; waits for them a while."""
    if _lookouts:
        if _relays:
            _relays.pop().part()
        jax.distributed.shutdown()
        _lookouts.pop().stop()


@contextlib.contextmanager
def faults_told(config: Config) -> Iterator[None]:
    """What one process raises is told here and now, and ends it: others wait for it.

    A fault that all processes have, as a mistake in the settings, is raised as alone.
    When a collective fails because a process is gone, the lookout tells which, and ends
    this one.
    """
    try:
        yield
    except Exception as error:
        peers = of_jax()
        if peers.count == 1:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(config.distributed.lost_s + 5)
        if not peers.meet(_ALL_RAISE_S):
            _leave(error)
        finish()
        raise


def _leave(error: Exception) -> None:
    """End this process with its fault; at exit JAX would wait for the others."""
    is_mistake = isinstance(error, ValueError | NotImplementedError)
    with contextlib.suppress(OSError, ValueError):
        if is_mistake:
            print("error:", *str(error).split(), file=sys.__stderr__, flush=True)
        else:
            traceback.print_exception(error, file=sys.__stderr__)
            sys.__stderr__.flush()
    os._exit(MISTAKE if is_mistake else FAILED)


class AgreedStop:
    """`StopSignal.received` as all processes of a run see it, at the same step.

    `post` starts a sum over devices of who has been told to stop; `received` waits for
    it. Posted before a step and read after the one before it was recorded, it costs no
    waiting: it then stands in the devices' queue in front of the step.
    """

    def __init__(self, stop: StopSignal, layout: Layout) -> None:
        self._stop, self._layout = stop, layout
        self._largest = jax.jit(jnp.max, out_shardings=layout.whole)
        self._posted: jax.Array | None = None
        self._agreed: int | None = 0

    def post(self) -> None:
        """Say what this process knows; all must, in the same order."""
        name = self._stop.received
        number = signal.Signals[name].value if name else 0
        mine = np.full(len(self._layout.mesh.local_devices), number, np.int32)
        flags = jax.make_array_from_process_local_data(self._layout.rows, mine)
        self._posted, self._agreed = self._largest(flags), None

    @property
    def received(self) -> str | None:
        """Name of the signal that some process had received at the last `post`."""
        if self._agreed is None:
            self._agreed = int(self._posted)
        return signal.Signals(self._agreed).name if self._agreed else None


def agreed(stop: StopSignal, layout: Layout | None) -> Any:
    """The signal to follow: this process's own, or that of all of them."""
    if layout is None or of_jax().count == 1:
        return stop
    return AgreedStop(stop, layout)
