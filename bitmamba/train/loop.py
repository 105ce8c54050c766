"""The main job: step, evaluate, save, tell. It has the only clock."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from bitmamba.command_line import BAD_NUMBERS, DONE, FAILED
from bitmamba.config import Config
from bitmamba.data import DamagedTokensError, DataBundle
from bitmamba.io.peers import of_jax
from bitmamba.io.writer import MetricsWriter, NoWriter
from bitmamba.report import screen, summary, units
from bitmamba.report.progress import Meter, progress_bar
from bitmamba.train import distributed, leave, records, restore, samples
from bitmamba.train.evaluate import against_base
from bitmamba.train.held_out import held_out_name
from bitmamba.train.prepare import Run, dry_run, prepare
from bitmamba.train.rollback import GO_ON, STOP, Bad, Guard
from bitmamba.train.signals import StopSignal
from bitmamba.train.watchdog import Watchdog

console = Console(highlight=False, soft_wrap=True)


def run(config: Config, data: DataBundle, *, dry: bool = False) -> Callable[[], int]:
    """Show and prepare a run; returns the function that trains it.

    Args:
        config, data: see `bitmamba.train.start`.
        dry: only show the model, the data and the memory; nothing is allocated.

    Returns:
        A function that does the rest and returns the exit code.

    Raises:
        ValueError: the checkpoint belongs to other data, settings or model; the
            initial parameters do not fit the model; the memory budget is too small;
            another run trains in the work directory, or it cannot be written.
        NotImplementedError: the asked kernels cannot run here.
    """
    # Of several processes one shows the run.
    console.quiet = not of_jax().is_first
    with StopSignal(at_once=config.guard.stop_code), distributed.faults_told(config):
        if not dry:
            prepared = prepare(config, data, console=console)
            return lambda: _train(prepared)
        dry_run(config, data, console=console)
        distributed.finish()
    return lambda: DONE


def _train(run: Run) -> int:
    """Steps, evaluations and saves up to the last step; returns the exit code."""
    with run.lock:
        try:
            return _train_until_damage(run)
        except DamagedTokensError as damage:
            console.print(f"[red]error: {damage}")
            return FAILED


def _train_until_damage(run: Run) -> int:
    config, first = run.config, int(run.state.step)
    writer = NoWriter()
    if run.peers.is_first:
        writer = MetricsWriter(config.workdir, resume_step=first or None)
    with (
        StopSignal() as stop,
        Watchdog(config.guard.stuck_s, config.workdir) as dog,
        distributed.faults_told(config),
    ):
        try:
            agreed = distributed.agreed(stop, run.parts.layout)
            code = _Loop(run, writer, agreed, dog).go()
        except BaseException:
            with contextlib.suppress(OSError):  # the fault itself is to be told
                writer.close()
            raise
        dog.beat("the last save")
        if not leave.close_all(console, writer, run.checkpointer):
            code = FAILED
        distributed.finish()
    return code


class _Stopped(Exception):
    """A signal came while something was evaluated."""


class _Loop:
    """The state of one pass through the steps; nothing outlives `go`.

    at: the step that `state` stands at, wherever no step is under way.
    """

    def __init__(
        self, run: Run, writer: MetricsWriter, stop: StopSignal, dog: Watchdog
    ) -> None:
        self.run, self.writer, self.stop, self.dog = run, writer, stop, dog
        self.config = run.config
        self.state = run.state
        self.first = self.at = int(run.state.step)
        self.base = dict(run.remembered.get("base", {}))
        self.recorder = records.Recorder(run, writer, console)
        self.guard = Guard(run, writer, console)
        self.meter = Meter(total=self.config.train.steps, start=self.first)

    def go(self) -> int:
        total = self.config.train.steps
        try:
            self._begin()
        except _Stopped:
            return self._stop(self.first)
        if self.first >= total:
            console.print(f"already trained to step {self.first} of {total}")
            written = partial(samples.are_written, self.config, total)
            if not self.run.peers.first(written):
                self._sample(total)
            self._summary()
            return DONE
        self.meter = Meter(total=total, start=self.first)
        code = None
        with progress_bar(console, total=total, start=self.first) as show:
            while code is None and self.at < total:
                code = self._stretch(show)
        if code is None:
            self._sample(total)
            self._summary()
            if wrong := self.recorder.noop.verdict():
                console.print(f"[red]error: {wrong}")
                return FAILED
        return DONE if code is None else code

    def _begin(self) -> None:
        """What comes before the first step, or was missed before a stop."""
        if self.first == 0:
            self._evaluate(0)
            self._sample(0)
        # A run that was told to stop saves first, and leaves this to us.
        elif self._evaluates(self.first) and not self.run.peers.first(
            self._is_evaluated
        ):
            self._evaluate(self.first)

    def _is_evaluated(self) -> bool:
        rows = summary.read_rows(Path(self.config.workdir) / "metrics.jsonl")
        return any(r["step"] == self.first and "eval/loss" in r for r in rows)

    def _stretch(self, show: Callable[[int, str], None]) -> int | None:
        """Steps from `at` on, to the end or to a roll-back; an exit code ends all."""
        batches = iter(self.run.batches(self.at))
        held = self.guard.held
        pending = None
        for number in range(self.at + 1, self.config.train.steps + 1):
            self.dog.beat(f"step {number}")
            before = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - before
            self.stop.post()
            self.state, metrics = self.run.step(self.state, held, self.run.put(batch))
            tokens = self.run.data.n_tokens(number - 1)
            self.meter.step_done(number, tokens=tokens, waited=waited)
            # One step late, so that the device never waits for the host.
            if pending:
                action, bad = self._record(*pending, show)
                if action != GO_ON:
                    return self._react(action, bad)
            pending = (number, metrics)
            due = self._evaluates(number) or self._saves(number) or self.stop.received
            if due or self.guard.must_look_at_once:
                self.at = number
                action, bad = self._record(*pending, show)
                pending = None
                code = self._react(action, bad)
                if code is None and due:
                    code = self._due(number)
                if code is not None or action != GO_ON:
                    return code
        return None

    def _evaluates(self, number: int) -> bool:
        return number == self.config.train.steps or number % self.config.eval.every == 0

    def _saves(self, number: int) -> bool:
        every = self.config.checkpoint.every
        return number == self.config.train.steps or number % every == 0

    def _due(self, number: int) -> int | None:
        """Evaluate, save, or stop after step `number`; an exit code ends all."""
        if self.stop.received:
            return self._stop(number)
        if self._evaluates(number):
            before = time.perf_counter()
            try:
                code = self._evaluate_until_good(number)
            except _Stopped:
                return self._stop(number)
            if code is not None:
                return code
            self.meter.exclude(time.perf_counter() - before)
        last = number == self.config.train.steps
        if last or (self._saves(number) and not self.guard.in_row):
            self._save(number)
            self._tell_failed_save()
        return None

    def _stop(self, number: int) -> int:
        saves = number > self.first and not self.guard.in_row
        if saves:
            self._save(number)
        self.dog.beat("the save before leaving")
        told = leave.last_words(self.run.checkpointer, number if saves else None)
        console.print(f"{self.stop.received}: {told}")
        return self.config.guard.stop_code

    def _record(
        self, number: int, metrics: dict, show: Callable
    ) -> tuple[str, Bad | None]:
        """Write one step's row; what is to be done about its numbers."""
        metrics = jax.device_get(metrics)
        if number == self.first + 1:
            seconds = time.perf_counter() - self.run.started
            console.print(f"first step done {units.duration(seconds)} after the start")
        loss = self.recorder.step(number, metrics, self.meter)
        show(number, self.meter.line(loss))
        self._tell_failed_save()
        return self.guard.look(number, metrics)

    def _react(self, action: str, bad: Bad | None) -> int | None:
        """Nothing, a roll-back, or the exit code of a run whose numbers went bad."""
        if action == GO_ON or bad is None:
            return None
        self.dog.beat("what follows from bad numbers")
        if action == STOP:
            self.guard.stop(bad, self.state)
            return BAD_NUMBERS
        bad_total = int(self.state.bad_total)
        self.state = None  # room for the other one
        self.state = self.guard.roll_back(bad, bad_total)
        self.at = bad.step
        return BAD_NUMBERS if self.state is None else None

    def _evaluate_until_good(self, number: int) -> int | None:
        while True:
            action, bad = self._evaluate(number)
            if action == GO_ON:
                return None
            if (code := self._react(action, bad)) is not None:
                return code

    def _evaluate(self, number: int) -> tuple[str, Bad | None]:
        def each():
            self.dog.beat(f"the evaluation at step {number}")
            self.stop.post()
            if self.stop.received:
                raise _Stopped

        result = records.evaluate(
            self.run, self.state.trainable, self.run.held, each=each
        )
        self.base = self.base or dict(result)
        result |= against_base(result, self.base)
        self.writer.write(number, result)
        console.print(screen.evaluation_line(number, result))
        return self.guard.look_at_evaluation(number, result)

    def _sample(self, number: int) -> None:
        self.dog.beat(f"the samples at step {number}")
        try:
            samples.sample(self.run, self.state.trainable, step=number)
        except OSError as error:
            console.print(f"[yellow]samples of step {number} not written: {error}")

    def _save(self, number: int) -> None:
        self.run.checkpointer.save(
            number,
            trainable=self.state.trainable,
            opt_state=self.state.opt_state,
            frozen_digests=self.run.frozen_digests,
            frozen_source=self.run.frozen_source,
            extra={
                **restore.remembered(self.state),
                "guard": self.guard.saved(),
                "base": self.base,
                "start": self.run.remembered.get("start", {}),
            },
        )

    def _tell_failed_save(self) -> None:
        if problem := self.run.checkpointer.poll():
            console.print(f"[yellow]{problem}")

    def _summary(self) -> None:
        if not self.run.peers.is_first:
            return
        seconds = time.perf_counter() - self.run.started
        figures = {"total time": units.duration(seconds)}
        if self.meter.steps_done:
            figures |= {
                "speed": f"{units.count(self.meter.tokens_per_s)} tokens/s",
                "waiting for data": units.percent(self.meter.data_share),
            }
        if empty := self.recorder.noop.empty_steps:
            figures["steps without a token to train"] = str(empty)
        try:
            summary.show_summary(
                console,
                Path(self.config.workdir),
                title=self.config.name,
                held_out=held_out_name(self.config.data, self.run.data.account),
                figures=figures | self.guard.figures(int(self.state.bad_total)),
            )
        except OSError as error:
            console.print(f"[yellow]summary not finished: {error}")
