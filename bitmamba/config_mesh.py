"""Over which devices and processes a run spreads.

`bitmamba.config` has everything else and re-exports these.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices of a run: one mesh with the axes `data` and `fsdp`.

    Rows of a batch are spread over both axes. What is trained, its optimiser state and
    what is frozen are cut into `fsdp` parts, each leaf along its largest axis that
    divides; a leaf is gathered where a step reads it. These settings may change on
    resume: the data stay the same, and with the same number of devices and the same
    collectives so do the bits.

    data: 0 is as many as there are devices for.
    min_size: a leaf with fewer elements is not cut, nor is a vector.
    """

    data: int = 1
    fsdp: int = 1
    min_size: int = 2**16


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Processes of a run, each with its own devices; one without any of this.

    coordinator: "host:port" of process 0, at which all meet. The port knows no
        password: it must be reachable from the job's own machines alone.
    processes, process_id: how many, and which is this one; None takes them from
        SLURM's step, and process_id also from an indexed Job of Kubernetes.
    bind: "address:port" on which process 0 listens; None is `coordinator` itself, so
        that only the network it names is served.
    detect: under SLURM, with several tasks in the step, start without being told.
    start_timeout_s: how long to wait for all processes at the start.
    lost_s: a process without a sign for so long is lost, and the run ends.
    """

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    bind: str | None = None
    detect: bool = True
    start_timeout_s: int = 300
    lost_s: float = 15.0


def check_mesh(mesh: MeshConfig) -> None:
    """Raise ValueError at the first value that cannot work on any devices."""
    for name, low in (("data", 0), ("fsdp", 1), ("min_size", 0)):
        value = getattr(mesh, name)
        if value < low:
            raise ValueError(
                f"config.mesh.{name}: got {value}; expected at least {low}"
            )


def check_distributed(cfg: DistributedConfig) -> None:
    """Raise ValueError at the first value that cannot work in any job."""
    where = "config.distributed"
    for name in ("coordinator", "bind"):
        address = getattr(cfg, name)
        if address is None:
            continue
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"{where}.{name}: got {address!r}; expected host:port, as 10.0.0.1:8476"
            )
    for name, low in (("processes", 1), ("process_id", 0), ("start_timeout_s", 1)):
        value = getattr(cfg, name)
        if value is not None and value < low:
            raise ValueError(f"{where}.{name}: got {value}; expected at least {low}")
    if not 5 <= cfg.lost_s < math.inf:
        raise ValueError(
            f"{where}.lost_s: got {cfg.lost_s:g}; expected at least 5 seconds (a busy "
            "machine is silent for a moment)"
        )
    if cfg.processes is not None and (cfg.process_id or 0) >= cfg.processes:
        raise ValueError(
            f"{where}.process_id: got {cfg.process_id} of {cfg.processes} processes; "
            f"expected 0 to {cfg.processes - 1}"
        )
