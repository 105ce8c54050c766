"""The loop of a sweep: each batch to every arm that still trains; stop, tell, write."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from bitmamba.command_line import BAD_NUMBERS, DONE, STOPPED
from bitmamba.data import DataBundle
from bitmamba.paths import flatten
from bitmamba.report import sweep as report
from bitmamba.report import units
from bitmamba.report.progress import Meter, progress_bar
from bitmamba.report.sweep_plot import sweep_picture
from bitmamba.train import build, guard
from bitmamba.train.arms import Arm
from bitmamba.train.divergence import Divergence, Limits
from bitmamba.train.evaluate import held_out_losses
from bitmamba.train.objective import Frozen
from bitmamba.train.signals import StopSignal
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


class Sweep(NamedTuple):
    """A sweep that is ready for its first step."""

    arms: Sequence[Arm]
    data: DataBundle
    groups: list[Group]
    limits: Limits
    out: Path
    command: Callable[[report.ArmResult], str]
    started: float


def train_arms(sweep: Sweep, console: Console) -> int:
    """Train all arms to the last step, or until each has diverged; the exit code."""
    console.print(sweep.limits.rule())
    with StopSignal() as stop:
        return _Loop(sweep, console, stop).go()


class _Loop:
    """The state of one pass through the steps; nothing outlives `go`."""

    def __init__(self, sweep: Sweep, console: Console, stop: StopSignal) -> None:
        self.sweep, self.console, self.stop = sweep, console, stop
        self.config = sweep.arms[0].config
        self.alive = set(range(len(sweep.arms)))
        self.training: list[list[tuple[int, float]]] = [[] for _ in sweep.arms]
        self.evaluations: list[list[dict]] = [[] for _ in sweep.arms]
        self.looks: list[Divergence] = []
        # The first arm of each rank stands for all: they adapt the same weights.
        self.watches = {g.arms[0]: ZeroWatch(g.leaves) for g in sweep.groups}
        self.done = 0

    def go(self) -> int:
        self._evaluate_base()
        total = self.config.train.steps
        self.meter = Meter(total=total, start=0)
        batches = iter(self.sweep.data.batches(0))
        with progress_bar(self.console, total=total, start=0) as show:
            while self.done < total and self.alive and not self.stop.received:
                self._step(self.done + 1, batches, show)
        if self.done == total:
            for i in self.alive:
                self.looks[i].end(total)
        results = self._results()
        self._write(results)
        self._show(results)
        if self.stop.received:
            self.console.print(f"{self.stop.received}: stopped at step {self.done}")
            return STOPPED
        return DONE if any(r.is_stable for r in results) else BAD_NUMBERS

    def _step(self, number: int, batches, show: Callable[[int, str], None]) -> None:
        before = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - before
        tokens = int(np.count_nonzero(batch.segment_ids)) * len(self.alive)
        batch = jax.device_put(batch)
        reads = [
            (group, group.runner.step(batch, self.alive))
            for group in self.sweep.groups
            if self.alive & set(group.arms)
        ]
        for group, read in reads:
            for i, metrics in read().items():
                self._record(number, i, metrics, group.leaves)
        self.done = number
        self.meter.step_done(number, tokens=tokens, waited=waited)
        losses = [self.training[i][-1][1] for i in self.alive]
        if losses:
            arms = f"{len(losses)} of {len(self.sweep.arms)} arms  lowest"
            show(number, f"{arms} {self.meter.line(min(losses))}")
        if number == self.config.train.steps or number % self.config.eval.every == 0:
            before = time.perf_counter()
            self._evaluate(number)
            self.meter.exclude(time.perf_counter() - before)

    def _record(
        self, number: int, i: int, metrics: Mapping[str, Any], leaves: list[str]
    ) -> None:
        loss = float(metrics["loss"])
        self.training[i].append((number, loss))
        self.looks[i].step(
            number,
            loss,
            bad_in_row=int(metrics["bad_in_row"]),
            where=guard.cause(metrics, leaves) or "",
        )
        counts = metrics["is_good"] and metrics["sums"].weight.sum() > 0
        if i in self.watches and "gradient_is_zero" in metrics and counts:
            self.watches[i].look(metrics["leaf_is_zero"], metrics["gradient_is_zero"])
        self._drop_diverged(i)

    def _evaluate_base(self) -> None:
        """Before step 1 every arm is the base: one evaluation serves all."""
        group = self.sweep.groups[0]
        row = {"step": 0, **self._losses(group, group.arms[0])}
        self.console.print(f"step 0, every arm: {_line(row)}")
        self.evaluations = [[row] for _ in self.sweep.arms]
        self.looks = [
            Divergence(self.sweep.limits, base_loss=row["eval/loss"])
            for _ in self.sweep.arms
        ]

    def _evaluate(self, number: int) -> None:
        for group in self.sweep.groups:
            for i in sorted(self.alive & set(group.arms)):
                row = {"step": number, **self._losses(group, i)}
                self.evaluations[i].append(row)
                name = arm_name(self.sweep.arms[i])
                self.console.print(f"step {number}, {name}: {_line(row)}")
                self.looks[i].evaluation(number, row["eval/loss"])
                self._drop_diverged(i)
        self._write(self._results())

    def _losses(self, group: Group, i: int) -> dict[str, float]:
        return held_out_losses(
            group.parts.eval_step,
            group.runner.state(i).trainable,
            group.helds[i],
            examples=self.sweep.data.eval_sft,
            text=self.sweep.data.eval_replay,
            categories=self.sweep.data.categories,
        )

    def _drop_diverged(self, i: int) -> None:
        if (found := self.looks[i].found) and i in self.alive:
            self.alive.discard(i)
            name = arm_name(self.sweep.arms[i])
            told = f"{name}: diverged at step {found.step}: {found.cause}"
            self.console.print(f"[red]{told}; the others go on")

    def _results(self) -> list[report.ArmResult]:
        unfinished = self.done < self.config.train.steps
        return [
            report.ArmResult(
                lr=arm.lr,
                weight_decay=arm.weight_decay,
                rank=arm.rank,
                training=self.training[i],
                evaluations=self.evaluations[i],
                diverged=self.looks[i].found,
                stopped=self.done if unfinished and i in self.alive else None,
            )
            for i, arm in enumerate(self.sweep.arms)
        ]

    def _write(self, results: Sequence[report.ArmResult]) -> None:
        """sweep.json, after every evaluation: what is known stays."""
        best = report.best_arm(results)
        found = {
            "rule": self.sweep.limits.rule(),
            "steps": self.config.train.steps,
            "done": self.done,
            "seconds": time.perf_counter() - self.sweep.started,
            "ranks": [
                {
                    "rank": self.sweep.arms[g.arms[0]].rank,
                    "arms": g.compiled.name,
                    "reason": g.compiled.reason,
                }
                for g in self.sweep.groups
            ],
            "arms": report.as_json(results),
            "findings": report.findings(results),
            "best": best,
            "command": None if best is None else self.sweep.command(results[best]),
        }
        text = json.dumps(found, indent=1, allow_nan=False)
        (self.sweep.out / "sweep.json").write_text(text + "\n", encoding="utf-8")

    def _show(self, results: Sequence[report.ArmResult]) -> None:
        self.console.rule(f"[bold]{self.config.name}: sweep of {len(results)} arms")
        epochs = self.sweep.data.account.epochs
        lines = report.table(results)
        self.console.print(
            f"held-out loss by step; {self.config.train.steps} steps are {epochs:.1f} "
            "passes over the examples; retention: held-out replay text, "
            f"{units.loss(self.evaluations[0][0].get('retention/loss'))} before"
        )
        for line in [*lines, *report.findings(results)]:
            self.console.print(line, markup=False)
        best = report.best_arm(results)
        if best is not None:
            self.console.print("train the best arm:")
            self.console.print(self.sweep.command(results[best]), markup=False)
        files = ["sweep.json"]
        if sweep_picture(
            results,
            self.sweep.out / "sweep.png",
            title=f"{self.config.name}: {len(results)} arms",
            factor=self.sweep.limits.factor,
        ):
            files.append("sweep.png")
        seconds = time.perf_counter() - self.sweep.started
        self.console.print(f"total time: {units.duration(seconds)}")
        self.console.print(f"in {self.sweep.out}: {', '.join(files)}")


def arm_name(arm: Arm) -> str:
    """ "lr 0.001 decay 0.01 rank 8" """
    rank = "" if arm.rank is None else f" rank {arm.rank}"
    return f"lr {arm.lr:g} decay {arm.weight_decay:g}{rank}"


def _line(row: Mapping[str, float]) -> str:
    names = {"eval/loss": "held-out", "retention/loss": "retention"}
    return "  ".join(
        f"{name} {units.loss(row[key])}" for key, name in names.items() if key in row
    )
