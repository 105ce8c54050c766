"""A sweep: runs unlike in learning rate, decay and rank share base, step and data."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from bitmamba.config import MeshConfig
from bitmamba.data import DataBundle
from bitmamba.io.checkpoint import Restored
from bitmamba.io.digests import tree_digests
from bitmamba.io.lock import Lock
from bitmamba.io.workdir import check_links
from bitmamba.optim import hyper
from bitmamba.paths import flatten
from bitmamba.report import units
from bitmamba.report.sweep import ArmResult
from bitmamba.train import build, restore, sweep_groups, sweep_resume
from bitmamba.train.arms import Arm
from bitmamba.train.device_memory import memory_limit, ways_to_less
from bitmamba.train.divergence import Limits
from bitmamba.train.signals import StopSignal
from bitmamba.train.sweep_loop import train_arms
from bitmamba.train.sweep_resume import Plan
from bitmamba.train.sweep_state import Group, Saves, Sweep

console = Console(highlight=False, soft_wrap=True)


def run(
    arms: Sequence[Arm],
    data: DataBundle,
    *,
    how: str,
    limits: Limits,
    out: Path,
    command: Callable[[ArmResult], str],
) -> Callable[[], int]:
    """Build and compile a sweep; returns the function that trains its arms.

    Args:
        arms: from `make_arms`; they differ in learning rate, decay and rank alone.
        data: of every arm; each batch is read once.
        how: "in_turn", "together" or "auto"; see `sweep_groups.compile_group`.
        limits: when an arm has diverged.
        out: folder for sweep.json, sweep.png and the checkpoints; the newest good one
            of the same sweep is gone on from.
        command: the command line of an arm.

    Returns:
        A function that does the rest and returns the exit code: DONE, BAD_NUMBERS when
        every arm diverged, guard.stop_code when told to stop, or FAILED when the last
        save failed.

    Raises:
        ValueError: nothing to evaluate on; several devices; a list that changes
            nothing; the memory budget is too small; the base does not fit the model;
            the checkpoints are of other arms, data or settings; a link in `out` leads
            out of it; another run trains there, or it cannot be written.
    """
    with StopSignal(at_once=arms[0].config.guard.stop_code):
        lock = Lock()
        lock.take(out, setting="--out")
        with lock.released_on_error():
            ready = _prepare(
                arms, data, how=how, limits=limits, out=out, command=command
            )

    def train() -> int:
        with lock:
            return train_arms(ready, console)

    return train


def _prepare(
    arms: Sequence[Arm],
    data: DataBundle,
    *,
    how: str,
    limits: Limits,
    out: Path,
    command: Callable[[ArmResult], str],
) -> Sweep:
    started = time.perf_counter()
    if not data.eval_sft and not data.eval_replay:
        raise ValueError(
            "sweep: got no held-out data; expected examples or text to compare arms "
            "on; set config.data.heldout_share or config.data.heldout_replay"
        )
    if arms[0].config.mesh != MeshConfig():
        raise ValueError(
            "config.mesh: got several devices in a sweep; expected one (data 1 x fsdp "
            "1): its arms share one device; start a run for each arm instead"
        )
    check_links(out)
    build.use_compilation_cache()
    plans = _plans(arms, data)
    checkpointer = sweep_resume.make_checkpointer(
        out, arms, data, how=how, limits=limits
    )
    found = sweep_resume.find(checkpointer, plans)
    groups, base = _groups(arms, plans, how, found)
    config = arms[0].config
    source = config.checkpoint.init_from or f"seed {config.seed}"
    saves = Saves(checkpointer, base, source)
    begun = None if found is None else (found.step, found.meta["extra"])
    return Sweep(arms, data, groups, limits, out, command, started, saves, begun)


def _plans(arms: Sequence[Arm], data: DataBundle) -> list[Plan]:
    """What each rank consists of; nothing is compiled or allocated."""
    by_rank: dict[int | None, list[int]] = {}
    for i, arm in enumerate(arms):
        by_rank.setdefault(arm.rank, []).append(i)
    plans = []
    for numbers in by_rank.values():
        parts = build.build_parts(arms[numbers[0]].config, data)
        plans.append((numbers, parts))
    _check_differences(arms, [parts for _, parts in plans])
    return plans


def _groups(
    arms: Sequence[Arm], plans: Sequence[Plan], how: str, found: Restored | None = None
) -> tuple[list[Group], dict[str, dict[str, str]]]:
    """Compile a step a rank, then load the base once and make the arms' states.

    Args:
        found: a checkpoint of the sweep, whose states are taken.

    Returns:
        (the groups, digests of the base as `sweep_resume.check_base` wants them).
    """
    made = []
    for numbers, parts in plans:
        mine = [arms[i] for i in numbers]
        made.append((numbers, parts, sweep_groups.compile_group(parts, mine, how)))
    _show_memory(arms, made)
    config = arms[0].config
    own, frozen = build.split_trainable(
        config, restore.base_params(config, plans[0][1])
    )
    base = {
        "frozen": tree_digests(frozen),
        "start": tree_digests(own) if config.loss.compares else {},
    }
    if found is not None:
        sweep_resume.check_base(found, base, config)
    own = jax.tree.map(jnp.asarray, own)
    held = build.hold(config, own, frozen)
    return [_group(arms, *one, own, held, found) for one in made], base


def _group(arms, numbers, parts, compiled, own, held, found) -> Group:
    config = arms[numbers[0]].config
    trainable, held = restore.first_values(config, parts, own, held)
    helds = {i: held._replace(hyper=hyper(arms[i].config.optim)) for i in numbers}
    alive = set(found.meta["extra"]["alive"]) if found else set()
    # One that was stopped begins again, unseen: arms that step together need a state.
    states = sweep_groups.first_states(parts, trainable, set(numbers) - alive)
    states |= {i: sweep_resume.state_of(found, i) for i in alive & set(numbers)}
    states = {i: states[i] for i in numbers}
    return Group(numbers, parts, compiled, compiled.make(states, helds), helds)


def _check_differences(arms: Sequence[Arm], all_parts: Sequence[build.Parts]) -> None:
    """A list that changes nothing would be a table of equal rows."""
    shapes = [str(flatten(parts.trainable)) for parts in all_parts]
    if len(set(shapes)) < len(shapes):
        raise ValueError(
            "--rank: got ranks that change nothing; expected adapters of "
            "config.lora.rank; leave rank out of config.lora.rules"
        )
    decays = any(
        parts.optimizer.groups.rule(path).decay
        for parts in all_parts
        for path in parts.optimizer.groups.index
    )
    if len({arm.weight_decay for arm in arms}) > 1 and not decays:
        raise ValueError(
            "--wd: got decays that change nothing; expected a rule of "
            "config.optim.rules with decay=True for something that trains"
        )


def _show_memory(arms: Sequence[Arm], made: Sequence[tuple]) -> None:
    """What the sweep will hold: the base once, a state an arm, one step's temporaries.

    Raises:
        ValueError: more than config.memory_gb, or than the device has.
    """
    peak, kept = 0, 0
    parts = made[0][1]
    base = sweep_groups.tree_bytes(parts.held._replace(hyper=None))
    console.print(f"frozen, held once: {units.size(base) if base else 'nothing'}")
    for numbers, parts, compiled in made:
        state = sweep_groups.tree_bytes(build.state_shape(parts))
        rank = arms[numbers[0]].rank
        name = "" if rank is None else f" of rank {rank}"
        console.print(
            f"{len(numbers)} arms{name}, {compiled.name} ({compiled.reason}): "
            f"{len(numbers)} x {units.size(state)} of parameters and optimiser state; "
            f"step compiled in {units.duration(compiled.seconds)}, "
            f"peak {units.size(compiled.peak)}"
        )
        states = len(numbers) * state
        peak, kept = max(peak, compiled.peak - states), kept + states
    whole = peak + kept
    console.print(f"peak of the sweep: {units.size(whole)}")
    limit = memory_limit(arms[0].config.memory_gb)
    if limit is not None and whole > limit.size:
        ways = ", ".join(["fewer arms", *ways_to_less(arms[0].config)])
        raise ValueError(
            f"{limit.setting}: the sweep needs {units.size(whole)}; expected at most "
            f"{units.size(limit.size)}{limit.of}; try {ways}"
        )
