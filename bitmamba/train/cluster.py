"""Which processes a run has: from the settings, or from the scheduler's environment."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from bitmamba.config import DistributedConfig

# SLURM hands out no port: one that other jobs on the machine hardly share.
_FIRST_PORT, _PORTS = 61440, 4096


class Place(NamedTuple):
    """Where the processes meet ("host:port"), how many they are, and which is this."""

    coordinator: str
    processes: int
    process_id: int


def find_place(cfg: DistributedConfig, environment: Mapping[str, str]) -> Place | None:
    """This process's place among the run's, or None if it is the only one.

    What is not set comes from SLURM's step (all of it), or from an indexed Job of
    Kubernetes (the index; it tells its pods neither their number nor an address).

    Raises:
        ValueError: something is neither set nor to be found.
    """
    step = _slurm_step(environment) if cfg.detect else None
    if cfg.coordinator is None and step is None:
        for name in ("processes", "process_id"):
            if getattr(cfg, name) is not None:
                raise ValueError(
                    f"config.distributed.coordinator: got none with {name}="
                    f"{getattr(cfg, name)}; expected host:port of process 0"
                )
        return None
    coordinator = cfg.coordinator or (step and step.coordinator)
    processes = cfg.processes or (step and step.processes)
    process_id = cfg.process_id
    if process_id is None:
        index = environment.get("JOB_COMPLETION_INDEX", "")
        process_id = int(index) if index.isdecimal() else step and step.process_id
    for name, value in (("processes", processes), ("process_id", process_id)):
        if value is None:
            raise ValueError(
                f"config.distributed.{name}: got none with coordinator="
                f"{coordinator}, and no SLURM step or indexed Job to take it from; "
                "expected a number"
            )
    if process_id >= processes:
        raise ValueError(
            f"config.distributed.processes: got {processes} for process {process_id}; "
            "expected more processes than the highest number of one"
        )
    return Place(coordinator, processes, process_id)


def _slurm_step(environment: Mapping[str, str]) -> Place | None:
    """The step that srun started, if it has several tasks."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    number = environment.get("SLURM_PROCID", "")
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    job = environment.get("SLURM_JOB_ID", "")
    if not (tasks.isdecimal() and number.isdecimal() and nodes and job.isdecimal()):
        return None
    if int(tasks) < 2:
        return None
    port = _FIRST_PORT + int(job) % _PORTS
    return Place(f"{first_host(nodes)}:{port}", int(tasks), int(number))


def first_host(nodes: str) -> str:
    """The first name of SLURM's compressed list: "gpu[003-005,9],cpu1" is gpu003."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST: got {nodes!r}; expected names of hosts")
    return match[1] + (match[2] or "") + (match[3] or "")
