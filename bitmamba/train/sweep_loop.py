"""The loop of a sweep: each batch to every arm that still trains; stop, tell, write."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console

from bitmamba.command_line import BAD_NUMBERS, DONE, FAILED
from bitmamba.report import units
from bitmamba.report.progress import Meter, progress_bar
from bitmamba.report.sweep import ArmResult
from bitmamba.train import guard, leave, sweep_results, sweep_resume
from bitmamba.train.evaluate import held_out_losses
from bitmamba.train.signals import StopSignal
from bitmamba.train.sweep_state import Group, Progress, Sweep, arm_name
from bitmamba.train.watchdog import Watchdog


def train_arms(sweep: Sweep, console: Console) -> int:
    """Train all arms to the last step, or until each has diverged; the exit code."""
    console.print(sweep.limits.rule())
    with (
        StopSignal() as stop,
        Watchdog(sweep.config.guard.stuck_s, sweep.out) as dog,
    ):
        code = _Loop(sweep, console, stop, dog).go()
        dog.beat("the last save")
        if not leave.close_all(console, sweep.saves.checkpointer):
            code = FAILED
    return code


class _Stopped(Exception):
    """A signal came."""


class _Loop:
    """The state of one pass through the steps; nothing outlives `go`."""

    def __init__(
        self, sweep: Sweep, console: Console, stop: StopSignal, dog: Watchdog
    ) -> None:
        self.sweep, self.console, self.stop, self.dog = sweep, console, stop, dog
        self.config = sweep.config
        self.total = self.config.train.steps
        self.now = Progress(
            len(sweep.arms), sweep.limits, {g.arms[0]: g.leaves for g in sweep.groups}
        )
        if sweep.begun:
            self.now.resume(*sweep.begun)
        self.first = self.now.done
        self.meter = Meter(total=self.total, start=self.first)

    def go(self) -> int:
        try:
            self._begin()
            self.meter = Meter(total=self.total, start=self.first)
            batches = iter(self.sweep.data.batches(self.first))
            with progress_bar(self.console, total=self.total, start=self.first) as show:
                while self.now.done < self.total and self.now.alive:
                    self._step(self.now.done + 1, batches, show)
        except _Stopped:
            return self._stop()
        if self.now.done == self.total:
            for i in self.now.alive:
                self.now.looks[i].end(self.total)
        found = self._write()
        sweep_results.show(self.sweep, found, self._seconds(), self.console)
        return DONE if any(r.is_stable for r in found) else BAD_NUMBERS

    def _begin(self) -> None:
        """What comes before the first step, or was missed before a stop."""
        if not self.sweep.begun:
            self._evaluate_base()
            return
        alive, done = len(self.now.alive), self.now.done
        missing = self.now.waits_for_evaluation() if self._evaluates(done) else []
        is_over = self._is_last(done) and not missing
        self.console.print(
            f"{'already done:' if is_over else 'resuming at'} step {done} of "
            f"{self.total} of {self.sweep.out}; {alive} of {len(self.sweep.arms)} arms "
            "have not diverged"
        )
        if missing:
            self._evaluate()
            if self._is_last(done):
                self._save()

    def _step(self, number: int, batches, show: Callable[[int, str], None]) -> None:
        self.dog.beat(f"step {number}")
        before = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - before
        alive = self.now.alive
        tokens = int(np.count_nonzero(batch.segment_ids)) * len(alive)
        batch = jax.device_put(batch)
        reads = [
            (group, group.runner.step(batch, alive))
            for group in self.sweep.groups
            if alive & set(group.arms)
        ]
        for group, read in reads:
            for i, metrics in read().items():
                self._record(number, i, metrics, group.leaves)
        self.now.done = number
        self.meter.step_done(number, tokens=tokens, waited=waited)
        losses = [self.now.training[i][-1][1] for i in alive]
        if losses:
            arms = f"{len(losses)} of {len(self.sweep.arms)} arms  lowest"
            show(number, f"{arms} {self.meter.line(min(losses))}")
        self._due(number)

    def _due(self, number: int) -> None:
        """Evaluate, save, or stop after step `number`."""
        if self.stop.received:
            raise _Stopped
        if self._evaluates(number):
            before = time.perf_counter()
            self._evaluate()
            self.meter.exclude(time.perf_counter() - before)
        if self._is_last(number) or number % self.config.checkpoint.every == 0:
            self._save()
        if problem := self.sweep.saves.checkpointer.poll():
            self.console.print(f"[yellow]{problem}")

    def _evaluates(self, number: int) -> bool:
        return number == self.total or number % self.config.eval.every == 0

    def _is_last(self, number: int) -> bool:
        return number == self.total or not self.now.alive

    def _save(self) -> None:
        states = {
            i: group.runner.to_save(i)
            for group in self.sweep.groups
            for i in group.arms
            if i in self.now.alive
        }
        checkpointer, base, source = self.sweep.saves
        sweep_resume.save(
            checkpointer,
            self.now.done,
            states,
            base=base,
            source=source,
            records=self.now.saved(self._seconds()),
        )

    def _stop(self) -> int:
        """Save what is new and say so; the table shows what is known."""
        is_new = self.now.done > self.first
        if is_new:
            self._save()
        self.dog.beat("the save before leaving")
        words = leave.last_words(
            self.sweep.saves.checkpointer, self.now.done if is_new else None
        )
        if self.now.looks:
            found = self._write()
            sweep_results.show(self.sweep, found, self._seconds(), self.console)
        self.console.print(f"{self.stop.received}: {words}")
        return self.config.guard.stop_code

    def _write(self) -> list[ArmResult]:
        """sweep.json, with what is known; a full disk is told and no more."""
        found = sweep_results.arm_results(self.sweep, self.now)
        try:
            sweep_results.write(self.sweep, found, self.now.done, self._seconds())
        except OSError as error:
            self.console.print(f"[yellow]sweep.json not written: {error}")
        return found

    def _seconds(self) -> float:
        """Of all processes that the sweep took."""
        return self.now.seconds + time.perf_counter() - self.sweep.started

    def _record(
        self, number: int, i: int, metrics: Mapping[str, Any], leaves: list[str]
    ) -> None:
        loss = float(metrics["loss"])
        self.now.training[i].append((number, loss))
        self.now.looks[i].step(
            number,
            loss,
            bad_in_row=int(metrics["bad_in_row"]),
            where=guard.cause(metrics, leaves) or "",
        )
        counts = metrics["is_good"] and metrics["sums"].weight.sum() > 0
        watches = self.now.watches
        if i in watches and "gradient_is_zero" in metrics and counts:
            watches[i].look(metrics["leaf_is_zero"], metrics["gradient_is_zero"])
        self._drop_diverged(i)

    def _evaluate_base(self) -> None:
        group = self.sweep.groups[0]
        row = {"step": 0, **self._losses(group, group.arms[0])}
        self.console.print(f"step 0, every arm: {_line(row)}")
        self.now.begin(row)

    def _evaluate(self) -> None:
        """Every arm that still trains and was not evaluated at this step."""
        waiting = set(self.now.waits_for_evaluation())
        number = self.now.done
        for group in self.sweep.groups:
            for i in sorted(waiting & set(group.arms)):
                row = {"step": number, **self._losses(group, i)}
                self.now.evaluations[i].append(row)
                name = arm_name(self.sweep.arms[i])
                self.console.print(f"step {number}, {name}: {_line(row)}")
                self.now.looks[i].evaluation(number, row["eval/loss"])
                self._drop_diverged(i)
        self._write()

    def _losses(self, group: Group, i: int) -> dict[str, float]:
        def eval_step(*arguments):
            self.dog.beat(f"the evaluation at step {self.now.done}")
            if self.stop.received:
                raise _Stopped
            return jax.block_until_ready(group.parts.eval_step(*arguments))

        return held_out_losses(
            eval_step,
            group.runner.state(i).trainable,
            group.helds[i],
            examples=self.sweep.data.eval_sft,
            text=self.sweep.data.eval_replay,
            categories=self.sweep.data.categories,
        )

    def _drop_diverged(self, i: int) -> None:
        if (found := self.now.looks[i].found) and i in self.now.alive:
            self.now.alive.discard(i)
            name = arm_name(self.sweep.arms[i])
            told = f"{name}: diverged at step {found.step}: {found.cause}"
            self.console.print(f"[red]{told}; the others go on")


def _line(row: Mapping[str, float]) -> str:
    names = {"eval/loss": "held-out", "retention/loss": "retention"}
    return "  ".join(
        f"{name} {units.loss(row[key])}" for key, name in names.items() if key in row
    )
