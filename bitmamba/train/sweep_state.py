"""A sweep: what it is made of, and what it knows of its arms after some steps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.paths import flatten
from bitmamba.report.sweep import ArmResult
from bitmamba.train import build
from bitmamba.train.arms import Arm
from bitmamba.train.divergence import Divergence, Limits
from bitmamba.train.objective import Frozen
from bitmamba.train.sweep_groups import Compiled, InTurn, Together
from bitmamba.train.watch import ZeroWatch


class Group(NamedTuple):
    """The arms of one rank: their numbers, parts, compiled step, and frozen values."""

    arms: list[int]
    parts: build.Parts
    compiled: Compiled
    runner: InTurn | Together
    helds: dict[int, Frozen]

    @property
    def leaves(self) -> list[str]:
        """Paths of what trains, in the order of the step's metrics."""
        return list(flatten(self.parts.trainable))


class Saves(NamedTuple):
    """Where a sweep saves, and from which base its arms began: digests, and a name."""

    checkpointer: Checkpointer
    base: dict[str, dict[str, str]]
    source: str


class Sweep(NamedTuple):
    """A sweep that is ready for its next step.

    begun: (steps done, records of the checkpoint that its states are from), or None.
    """

    arms: Sequence[Arm]
    data: DataBundle
    groups: list[Group]
    limits: Limits
    out: Path
    command: Callable[[ArmResult], str]
    started: float
    saves: Saves
    begun: tuple[int, dict[str, Any]] | None

    @property
    def config(self) -> Config:
        """Of the first arm; what arms have in common is read from it."""
        return self.arms[0].config


def arm_name(arm: Arm) -> str:
    """ "lr 0.001 decay 0.01 rank 8" """
    rank = "" if arm.rank is None else f" rank {arm.rank}"
    return f"lr {arm.lr:g} decay {arm.weight_decay:g}{rank}"


class Progress:
    """The records of all arms, whatever became of them.

    done: steps. alive: arms that still train. training: (step, loss) of each arm's
    steps. evaluations: its rows. looks: for its divergence. watches: of the first arm
    of each rank, which stands for all: they adapt the same weights. seconds: that
    processes before this one took.
    """

    def __init__(
        self, n: int, limits: Limits, watched: Mapping[int, Sequence[str]]
    ) -> None:
        """watched: paths of what trains, by the first arm of each rank."""
        self.done = 0
        self.alive = set(range(n))
        self.training: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        self.evaluations: list[list[dict]] = [[] for _ in range(n)]
        self.looks: list[Divergence] = []
        self.watches = {i: ZeroWatch(paths) for i, paths in watched.items()}
        self.seconds = 0.0
        self._limits = limits

    def begin(self, row: Mapping[str, float]) -> None:
        """Before step 1 every arm is the base: one evaluation serves all."""
        self.evaluations = [[dict(row)] for _ in self.evaluations]
        self._look_from_base()

    def waits_for_evaluation(self) -> list[int]:
        """Arms that still train and have no row of the last step."""
        return [
            i
            for i in sorted(self.alive)
            if not self.evaluations[i] or self.evaluations[i][-1]["step"] != self.done
        ]

    def saved(self, seconds: float) -> dict[str, Any]:
        """All of it, JSON-able; `done` is the checkpoint's step."""
        return {
            "alive": sorted(self.alive),
            "training": self.training,
            "evaluations": self.evaluations,
            "looks": [look.saved() for look in self.looks],
            "watches": {str(i): watch.saved() for i, watch in self.watches.items()},
            "seconds": seconds,
        }

    def resume(self, done: int, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` made."""
        self.done, self.alive = done, set(saved["alive"])
        self.training = [[tuple(pair) for pair in arm] for arm in saved["training"]]
        self.evaluations = saved["evaluations"]
        self._look_from_base()
        for look, was in zip(self.looks, saved["looks"], strict=True):
            look.resume(was)
        for i, watch in self.watches.items():
            watch.resume(saved["watches"][str(i)])
        self.seconds = saved["seconds"]

    def _look_from_base(self) -> None:
        self.looks = [
            Divergence(self._limits, base_loss=rows[0]["eval/loss"])
            for rows in self.evaluations
        ]
