"""Prepares a run: shows it, restores or initialises it, compiles its step."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bitmamba import config_read
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.lora.coverage import coverage
from bitmamba.models.sites import adapter_sites
from bitmamba.optim import chain_hints, group_table
from bitmamba.paths import flatten, merge
from bitmamba.report import plan, screen
from bitmamba.train import base_logits, build, memory, restore
from bitmamba.train.objective import Frozen
from bitmamba.train.state import TrainState
from bitmamba.types import Batch, BatchWithBase


class Run(NamedTuple):
    """A run that is ready for its next step.

    batches: (number of steps done) -> what the following steps read.
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


def dry_run(config: Config, data: DataBundle, *, console: Console) -> None:
    """Show what would run, without allocating the model."""
    build.use_compilation_cache()
    parts = build.build_parts(config, data)
    _show_start(console, config, data, parts)
    needed, seconds = memory.plan_step(config, data, parts)
    _show_memory(console, config, parts, needed, seconds)


def prepare(config: Config, data: DataBundle, *, console: Console) -> Run:
    """Build, restore and compile.

    Raises:
        ValueError: the checkpoint belongs to other data, settings or model; the
            initial parameters do not fit the model.
        NotImplementedError: the asked kernels cannot run here.
    """
    started = time.perf_counter()
    build.use_compilation_cache()
    parts = build.build_parts(config, data)
    _show_start(console, config, data, parts)
    checkpointer = restore.make_checkpointer(config, data)
    begin = restore.start_or_resume(config, parts, checkpointer)
    compiled, seconds = build.compile_step(config, parts)
    _show_memory(console, config, parts, plan.step_memory(compiled), seconds)
    config_read.write_json(config, Path(config.workdir) / "config.json")
    batches = data.batches
    if config.loss.is_cached:
        batches = base_logits.batches_with_base(
            config, data, parts, begin, console=console
        )
    return Run(
        config=config,
        data=data,
        batches=batches,
        parts=parts,
        step=compiled,
        state=begin.state,
        held=begin.held,
        frozen_digests=begin.digests,
        frozen_source=begin.source,
        remembered=begin.remembered,
        checkpointer=checkpointer,
        started=started,
    )


def _show_start(
    console: Console, config: Config, data: DataBundle, parts: build.Parts
) -> None:
    everything = merge(parts.trainable, parts.frozen)
    sites = adapter_sites(config.model, parts.base_shapes)
    grouped = parts.trainable if config.train.mode == "lora" else everything
    screen.show_start(
        console,
        config,
        shapes=flatten(everything),
        trainable=flatten(parts.trainable),
        groups=group_table(config.optim.rules, grouped),
        coverage=coverage(sites, parts.model.adapters),
        account=data.account.lines(),
        memory=build.memory_plan(config, parts),
        hints=chain_hints(
            config.optim,
            steps=config.train.steps,
            clamp_allowed=config.train.mode != "head_only",
        ),
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
    if problem := plan.check_budget(whole, config.memory_gb):
        raise ValueError(problem)
