"""A sweep's checkpoints: states of the arms that still train, and the records of all.

They are the main job's, with a tree `arm_<i>` for each arm; what an arm's state has
beside arrays is in the step's JSON.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitmamba import config_read
from bitmamba.data import DataBundle
from bitmamba.io.checkpoint import Checkpointer, Restored
from bitmamba.io.digests import check_same
from bitmamba.train import build, restore
from bitmamba.train.arms import Arm
from bitmamba.train.divergence import Limits
from bitmamba.train.state import TrainState

ANEW = "restore it, or begin a new sweep with another --out"

# The arms of one rank: their numbers, and what they consist of.
Plan = tuple[list[int], build.Parts]


def make_checkpointer(
    out: Path, arms: Sequence[Arm], data: DataBundle, *, how: str, limits: Limits
) -> Checkpointer:
    """Checkpoints under `<out>/checkpoints`."""
    config = arms[0].config
    return Checkpointer(
        out / "checkpoints",
        keep=config.checkpoint.keep,
        fingerprints=_fingerprints(arms, data, how=how, limits=limits),
        config=config_read.to_json(config),
        advice=ANEW,
    )


def _fingerprints(
    arms: Sequence[Arm], data: DataBundle, *, how: str, limits: Limits
) -> dict[str, Any]:
    """What must not change between a save and a resume: all that a verdict rests on."""
    config = arms[0].config
    found = restore.fingerprints(config, data)
    found["optim"] = {
        k: v for k, v in found["optim"].items() if k not in ("lr", "weight_decay")
    }
    if "lora" in found:
        found["lora"] = {k: v for k, v in found["lora"].items() if k != "rank"}
    return found | {
        # Values in the order in which they number the arms.
        "--lr": list(dict.fromkeys(arm.lr for arm in arms)),
        "--wd": list(dict.fromkeys(arm.weight_decay for arm in arms)),
        "--rank": list(dict.fromkeys(arm.rank for arm in arms)),
        "--arms": how,
        "--factor": limits.factor,
        "--looks": limits.looks,
        "train.max_bad_steps": limits.max_bad_steps,
        "eval.every": config.eval.every,
        "eval.max_windows": config.eval.max_windows,
    }


def find(checkpointer: Checkpointer, plans: Sequence[Plan]) -> Restored | None:
    """The newest good checkpoint of the sweep; None if it has not begun.

    Raises:
        ValueError: its arms, data or settings were others.
    """
    shapes = {i: build.state_shape(parts) for numbers, parts in plans for i in numbers}

    def target(field: str):
        def of(meta: dict[str, Any]) -> dict[str, Any]:
            alive = meta["extra"]["alive"]
            return {arm_key(i): getattr(shapes[i], field) for i in alive}

        return of

    return checkpointer.restore_latest(target("trainable"), target("opt_state"))


def state_of(found: Restored, arm: int) -> TrainState:
    """The state of one arm that still trains."""
    key = arm_key(arm)
    return restore.state_of(
        found._replace(
            trainable=found.trainable[key],
            opt_state=found.opt_state[key],
            meta={"extra": found.meta["extra"]["states"][key]},
        )
    )


def check_base(found: Restored, base: dict[str, dict[str, str]], config: Any) -> None:
    """Refuse a base that is not the one the arms began from.

    Args:
        base: digests of its "frozen" parameters, and of those that are trained, at
            their "start".
    """
    begun = {
        "frozen": found.meta["frozen"]["digests"],
        "start": found.meta["extra"]["start"],
    }
    source = config.checkpoint.init_from or f"seed {config.seed}"
    for part, table in base.items():
        where = f"{source} is not the base that this sweep began from"
        check_same(table, begun[part], where=where, advice=ANEW)


def save(
    checkpointer: Checkpointer,
    step: int,
    states: dict[int, TrainState],
    *,
    base: dict[str, dict[str, str]],
    source: str,
    records: dict[str, Any],
) -> None:
    """Start to save the arms that still train, and `records` of all."""
    named = {arm_key(i): state for i, state in states.items()}
    checkpointer.save(
        step,
        trainable={key: state.trainable for key, state in named.items()},
        opt_state={key: state.opt_state for key, state in named.items()},
        frozen_digests=base["frozen"],
        frozen_source=source,
        extra={
            **records,
            "start": base["start"],
            "states": {key: restore.remembered(s) for key, s in named.items()},
        },
    )


def arm_key(arm: int) -> str:
    """Name of an arm's part of a checkpoint."""
    return f"arm_{arm}"
