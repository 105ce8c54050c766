"""Prepares a run: shows it, restores or initialises it, compiles its step."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from bitmamba import config_read
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.io.lock import Lock
from bitmamba.io.peers import ALONE, Peers, of_jax
from bitmamba.lora.coverage import coverage
from bitmamba.models.sites import adapter_sites
from bitmamba.optim import GroupRow, chain_hints, group_table
from bitmamba.paths import flatten, merge
from bitmamba.report import plan, screen
from bitmamba.train import base_logits, build, device_memory, memory, restore
from bitmamba.train.held_out import held_out_hints
from bitmamba.train.layout import Layout
from bitmamba.train.objective import Frozen
from bitmamba.train.state import TrainState
from bitmamba.types import Batch, BatchWithBase


class Run(NamedTuple):
    """A run that is ready for its next step.

    batches: (number of steps done) -> what the following steps read, numpy; of several
        processes each has its own rows.
    """

    config: Config
    data: DataBundle
    batches: Callable[[int], Iterator[Batch | BatchWithBase]]
    parts: build.Parts
    step: Callable
    state: TrainState
    held: Frozen
    frozen_digests: dict[str, str]
    frozen_source: str | None
    remembered: dict[str, Any]
    checkpointer: Checkpointer
    started: float
    lock: Lock
    peers: Peers = ALONE

    def put(self, batch: Batch | BatchWithBase) -> Batch | BatchWithBase:
        """A batch where the step reads it."""
        return self.parts.layout.put(batch) if self.parts.layout else batch


def dry_run(config: Config, data: DataBundle, *, console: Console) -> None:
    """Show what would run, without allocating the model."""
    build.use_compilation_cache()
    parts = build.build_parts(config, data)
    _show_start(console, config, data, parts)
    needed, seconds = memory.plan_step(config, data, parts)
    _show_memory(console, config, parts, needed, seconds)


def prepare(config: Config, data: DataBundle, *, console: Console) -> Run:
    """Build, restore and, unless the run is at its end, compile.

    Raises:
        ValueError: the checkpoint belongs to other data, settings or model; the
            initial parameters do not fit the model; another run trains in the work
            directory, or it cannot be written.
        NotImplementedError: the asked kernels cannot run here.
    """
    started = time.perf_counter()
    build.use_compilation_cache()
    peers = of_jax()
    _check_processes(config, data, peers)
    lock = _lock_workdir(config, peers)
    with lock.released_on_error():
        return _prepare(config, data, peers, lock, console=console, started=started)


def _prepare(
    config: Config,
    data: DataBundle,
    peers: Peers,
    lock: Lock,
    *,
    console: Console,
    started: float,
) -> Run:
    parts = build.build_parts(config, data)
    _show_start(console, config, data, parts)
    checkpointer = restore.make_checkpointer(config, data, peers)
    begin = restore.start_or_resume(config, parts, checkpointer)
    if first := int(begin.state.step):
        console.print(f"goes on from step {first} of {config.train.steps}")
    step = parts.step
    if first < config.train.steps:  # else nothing is left for it
        step, seconds = build.compile_step(config, parts)
        _show_memory(console, config, parts, plan.step_memory(step), seconds)
    if peers.is_first:
        config_read.write_json(config, Path(config.workdir) / "config.json")
    batches = data.batches
    if peers.count > 1:
        own = {"process_index": peers.index, "process_count": peers.count}
        batches = partial(batches, **own)
    if config.loss.is_cached:
        batches = base_logits.batches_with_base(
            config, data, parts, begin, console=console
        )
    return Run(
        config=config,
        data=data,
        batches=batches,
        parts=parts,
        step=step,
        state=begin.state,
        held=begin.held,
        frozen_digests=begin.digests,
        frozen_source=begin.source,
        remembered=begin.remembered,
        checkpointer=checkpointer,
        started=started,
        lock=lock,
        peers=peers,
    )


def _lock_workdir(config: Config, peers: Peers) -> Lock:
    """Process 0 takes it for all of them; all are refused together."""
    lock = Lock()

    def take() -> str | None:
        try:
            lock.take(config.workdir, setting="config.workdir")
        except ValueError as refused:
            return str(refused)
        return None

    if problem := peers.first(take):
        raise ValueError(problem)
    return lock


def _check_processes(config: Config, data: DataBundle, peers: Peers) -> None:
    """Every process must have the same settings and data, and so the same plan."""
    plain = config_read.to_json(config)
    # Which process it is, and where it listens, is each process's own.
    plain.pop("distributed")
    mine = {"data": restore.fingerprints(config, data), "config": plain}
    said = [flatten(one) for one in peers.gather(mine)]
    for number, theirs in enumerate(said):
        for name in sorted(said[0].keys() | theirs.keys()):
            if said[0].get(name) != theirs.get(name):
                raise ValueError(
                    f"process {number} of {peers.count}: {name}: got "
                    f"{theirs.get(name)}; expected {said[0].get(name)} as process 0; "
                    "start every process with the same settings and files"
                )
    if config.loss.is_cached and peers.count > 1:
        raise NotImplementedError(
            "config.loss.base_logits: got cached with several processes; expected "
            "copy, or one process; set config.loss.base_logits=copy"
        )


def _show_start(
    console: Console, config: Config, data: DataBundle, parts: build.Parts
) -> None:
    everything = merge(parts.trainable, parts.frozen)
    sites = adapter_sites(config.model, parts.base_shapes)
    screen.show_start(
        console,
        config,
        shapes=flatten(everything),
        trainable=flatten(parts.trainable),
        groups=_groups(config, parts, everything),
        coverage=coverage(sites, parts.model.adapters),
        account=data.account.lines(),
        memory=build.memory_plan(config, parts),
        hints=[
            *chain_hints(
                config.optim,
                steps=config.train.steps,
                clamp_allowed=config.train.mode != "head_only",
            ),
            *held_out_hints(config.data, data.account),
        ],
    )
    _show_devices(console, parts.layout)


def _groups(config: Config, parts: build.Parts, everything: Any) -> list[GroupRow]:
    if config.train.mode != "lora":
        return group_table(config.optim.rules, everything, parts.trainable)
    try:
        return group_table(config.optim.rules, parts.trainable)
    except ValueError as error:  # as of configs/sft.py, whose rules are for all weights
        raise ValueError(
            f"config.{error}; train.mode=lora trains adapters only: expected rules for "
            "those; start from --config=configs/lora.py, which has them"
        ) from None


def _show_devices(console: Console, layout: Layout | None) -> None:
    if layout is not None:
        console.print(layout.line())
    elif (there := jax.device_count()) > 1:
        console.print(
            f"[yellow]note: 1 of {there} devices is used; config.mesh.data=0 uses all"
        )


def _show_memory(
    console: Console,
    config: Config,
    parts: build.Parts,
    needed: plan.StepMemory,
    seconds: float,
) -> None:
    whole = plan.with_step(build.memory_plan(config, parts), needed)
    screen.show_memory(console, whole, compile_seconds=seconds)
    limit = device_memory.memory_limit(config.memory_gb)
    ways = device_memory.ways_to_less(config)
    if limit and (problem := plan.check_budget(whole, *limit, ways=ways)):
        raise ValueError(problem)
