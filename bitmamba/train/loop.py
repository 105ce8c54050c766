"""The main job: step, evaluate, save, tell. It has the only clock."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from bitmamba.command_line import BAD_NUMBERS, DONE, FAILED, STOPPED
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.writer import MetricsWriter
from bitmamba.paths import flatten, merge
from bitmamba.report import screen, summary, units
from bitmamba.report.progress import Meter, progress_bar
from bitmamba.train import samples
from bitmamba.train.evaluate import against_base, held_out_losses
from bitmamba.train.metrics import category_losses, total_sums
from bitmamba.train.prepare import Run, dry_run, prepare
from bitmamba.train.signals import StopSignal
from bitmamba.train.watch import ZeroWatch

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
            initial parameters do not fit the model; the memory budget is too small.
        NotImplementedError: the asked kernels cannot run here.
    """
    if dry:
        dry_run(config, data, console=console)
        return lambda: DONE
    prepared = prepare(config, data, console=console)
    return lambda: _train(prepared)


def _train(run: Run) -> int:
    """Steps, evaluations and saves up to the last step; returns the exit code."""
    first = int(run.state.step)
    writer = MetricsWriter(run.config.workdir, resume_step=first)
    with StopSignal() as stop:
        try:
            code = _Loop(run, writer, stop).go()
        finally:
            writer.close()
    try:
        run.checkpointer.close()
    except OSError as error:
        console.print(f"[red]error: {error}")
        return FAILED
    return code


class _Loop:
    """The state of one pass through the steps; nothing outlives `go`."""

    def __init__(self, run: Run, writer: MetricsWriter, stop: StopSignal) -> None:
        self.run, self.writer, self.stop = run, writer, stop
        self.config = run.config
        self.state = run.state
        self.first = int(run.state.step)
        self.base = dict(run.remembered.get("base", {}))
        self.leaves = list(flatten(run.parts.trainable))
        self.watch = ZeroWatch(self.leaves)
        self.meter = Meter(total=self.config.train.steps, start=self.first)

    def go(self) -> int:
        total = self.config.train.steps
        if self.first >= total:
            console.print(f"already trained to step {self.first} of {total}")
            self._summary()
            return DONE
        if self.first == 0:
            self._evaluate(0)
            self._sample(0)
        elif self.first % self.config.eval.every == 0:
            self._evaluate_if_missed()
        self.meter = Meter(total=total, start=self.first)
        with progress_bar(console, total=total, start=self.first) as show:
            code = self._steps(show)
        if code == DONE:
            self._sample(total)
            self._summary()
        return code

    def _steps(self, show: Callable[[int, str], None]) -> int:
        batches = iter(self.run.batches(self.first))
        pending = None
        for number in range(self.first + 1, self.config.train.steps + 1):
            before = time.perf_counter()
            batch = next(batches)
            waited = time.perf_counter() - before
            self.state, metrics = self.run.step(self.state, self.run.held, batch)
            tokens = int(np.count_nonzero(batch.segment_ids))
            self.meter.step_done(number, tokens=tokens, waited=waited)
            # One step late, so that the device never waits for the host.
            if pending and (code := self._record(*pending, show)) is not None:
                return code
            pending = (number, metrics)
            if self._is_due(number) or self.stop.received:
                if (code := self._record(*pending, show)) is not None:
                    return code
                pending = None
                if (code := self._due(number)) is not None:
                    return code
        return DONE

    def _is_due(self, number: int) -> bool:
        last = number == self.config.train.steps
        evaluates = number % self.config.eval.every == 0
        return last or evaluates or number % self.config.checkpoint.every == 0

    def _due(self, number: int) -> int | None:
        """Evaluate, save, or stop after step `number`."""
        last = number == self.config.train.steps
        if self.stop.received:
            return self._stop(number)
        if last or number % self.config.eval.every == 0:
            before = time.perf_counter()
            self._evaluate(number)
            self.meter.exclude(time.perf_counter() - before)
        if last or number % self.config.checkpoint.every == 0:
            self._save(number)
        return None

    def _stop(self, number: int) -> int:
        self._save(number)
        problem = self.run.checkpointer.wait()
        saved = problem or f"saved step {number}; the same command goes on from there"
        console.print(f"{self.stop.received}: {saved}")
        return STOPPED

    def _record(self, number: int, metrics: dict, show: Callable) -> int | None:
        """Write one step's row; an exit code when numbers stay bad."""
        metrics = jax.device_get(metrics)
        loss = float(metrics["loss"])
        if number == self.first + 1:
            seconds = time.perf_counter() - self.run.started
            console.print(f"first step done {units.duration(seconds)} after the start")
        names = self.run.data.categories
        sums = total_sums([metrics["sums"]], len(names))
        by_category = category_losses(sums, names)
        row = {
            "loss": loss,
            "tokens_per_s": self.meter.tokens_per_s,
            "data_wait_share": self.meter.data_share,
            "loss_tokens": float(sums.weight.sum()),
            "bad_in_row": int(metrics["bad_in_row"]),
            **{f"train/{k}/loss": v for k, v in by_category.items()},
            **{k: float(v) for k, v in metrics["report"].items()},
        }
        if "divergence" in metrics:
            row["tmkl"] = float(metrics["divergence"])
        self.writer.write(number, row)
        show(number, self.meter.line(loss))
        if problem := self.run.checkpointer.poll():
            console.print(f"[yellow]{problem}")
        if "gradient_is_zero" in metrics and metrics["is_good"] and row["loss_tokens"]:
            self.watch.look(metrics["leaf_is_zero"], metrics["gradient_is_zero"])
        return self._check_numbers(number, metrics)

    def _check_numbers(self, number: int, metrics: dict) -> int | None:
        if metrics["is_good"]:
            return None
        bad = [
            path
            for path, fine in zip(self.leaves, metrics["leaf_is_finite"], strict=True)
            if not fine
        ]
        where = f"gradient of {bad[0]} ({len(bad)} in all)" if bad else "loss"
        in_row = int(metrics["bad_in_row"])
        console.print(
            f"[red]step {number}: {where} is not finite; update skipped "
            f"({in_row} in a row)"
        )
        if in_row < self.config.train.max_bad_steps:
            return None
        good = self.run.checkpointer.last_good()
        kept = "no checkpoint" if good is None else f"last good checkpoint: step {good}"
        console.print(f"[red]stopped: numbers went bad; {kept}")
        return BAD_NUMBERS

    def _evaluate(self, number: int) -> None:
        result = held_out_losses(
            self.run.parts.eval_step,
            self.state.trainable,
            self.run.held,
            examples=self.run.data.eval_sft,
            text=self.run.data.eval_replay,
            categories=self.run.data.categories,
        )
        self.base = self.base or dict(result)
        result |= against_base(result, self.base)
        self.writer.write(number, result)
        console.print(screen.evaluation_line(number, result))

    def _evaluate_if_missed(self) -> None:
        """A run that was told to stop saves first, and leaves its evaluation to us."""
        rows = summary.read_rows(Path(self.config.workdir) / "metrics.jsonl")
        if not any(r["step"] == self.first and "eval/loss" in r for r in rows):
            self._evaluate(self.first)

    def _sample(self, number: int) -> None:
        params = merge(self.state.trainable, self.run.held.weights)
        texts = samples.continue_prompts(
            self.config, self.run.data, self.run.parts.model, params
        )
        path = Path(self.config.workdir) / "samples.jsonl"
        with path.open("a" if number else "w", encoding="utf-8") as file:
            for prompt, text in texts:
                row = {"step": number, "prompt": prompt, "text": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _save(self, number: int) -> None:
        self.run.checkpointer.save(
            number,
            trainable=self.state.trainable,
            opt_state=self.state.opt_state,
            frozen_digests=self.run.frozen_digests,
            frozen_source=self.run.frozen_source,
            extra={
                "bad_in_row": int(self.state.bad_in_row),
                "bad_total": int(self.state.bad_total),
                "base": self.base,
                "start": self.run.remembered.get("start", {}),
            },
        )

    def _summary(self) -> None:
        seconds = time.perf_counter() - self.run.started
        figures = {"total time": units.duration(seconds)}
        if self.meter.steps_done:
            figures |= {
                "speed": f"{units.count(self.meter.tokens_per_s)} tokens/s",
                "waiting for data": units.percent(self.meter.data_share),
            }
        if bad := int(self.state.bad_total):
            figures["skipped steps (numbers not finite)"] = str(bad)
        summary.show_summary(
            console,
            Path(self.config.workdir),
            title=self.config.name,
            figures=figures,
        )
