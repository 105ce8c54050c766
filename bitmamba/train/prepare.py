"""Prepares a run: shows it, restores or initialises it, compiles its step."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bitmamba import config_read
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.optim import chain_hints, group_table
from bitmamba.paths import flatten
from bitmamba.report import plan, screen
from bitmamba.train import build
from bitmamba.train.state import TrainState
from bitmamba.types import Params


class Run(NamedTuple):
    """A run that is ready for its next step."""

    config: Config
    data: DataBundle
    parts: build.Parts
    step: Callable
    state: TrainState
    frozen: Params
    frozen_digests: dict[str, str]
    remembered: dict[str, Any]
    checkpointer: Checkpointer
    started: float


def dry_run(config: Config, data: DataBundle, *, console: Console) -> None:
    """Show what would run, without allocating the model."""
    build.use_compilation_cache()
    parts = build.build_parts(config, data)
    _show_start(console, config, data, parts)
    compiled, seconds = build.compile_step(config, parts)
    _show_memory(console, config, parts, compiled, seconds)


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
    checkpointer = build.make_checkpointer(config, data)
    begin = build.start_or_resume(config, parts, checkpointer)
    compiled, seconds = build.compile_step(config, parts)
    _show_memory(console, config, parts, compiled, seconds)
    config_read.write_json(config, Path(config.workdir) / "config.json")
    return Run(
        config=config,
        data=data,
        parts=parts,
        step=compiled,
        state=begin.state,
        frozen=begin.frozen,
        frozen_digests=begin.frozen_digests,
        remembered=begin.remembered,
        checkpointer=checkpointer,
        started=started,
    )


def _show_start(
    console: Console, config: Config, data: DataBundle, parts: build.Parts
) -> None:
    screen.show_start(
        console,
        config,
        shapes=flatten(parts.shapes),
        trainable=flatten(parts.trainable),
        groups=group_table(config.optim.rules, parts.shapes),
        account=data.account.lines(),
        memory=build.memory_plan(config, parts),
        hints=chain_hints(
            config.optim,
            steps=config.train.steps,
            clamp_allowed=config.train.mode != "head_only",
        ),
    )


def _show_memory(
    console: Console, config: Config, parts: build.Parts, compiled, seconds: float
) -> None:
    whole = plan.with_compiled(build.memory_plan(config, parts), compiled)
    screen.show_memory(console, whole, compile_seconds=seconds)
    if problem := plan.check_budget(whole, config.memory_gb):
        raise ValueError(problem)
