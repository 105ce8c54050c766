"""Rows of metrics.jsonl: a training step's, and the held-out losses."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console

from bitmamba.io.writer import MetricsWriter
from bitmamba.paths import flatten
from bitmamba.report.progress import Meter
from bitmamba.train.evaluate import held_out_losses
from bitmamba.train.metrics import category_losses, total_sums
from bitmamba.train.noop import NoopWatch
from bitmamba.train.objective import Frozen
from bitmamba.train.prepare import Run
from bitmamba.train.watch import ZeroWatch
from bitmamba.types import Params


class Recorder:
    """Writes a row for each step, and looks at what it did: `watch.py`, `noop.py`."""

    def __init__(self, run: Run, writer: MetricsWriter, console: Console) -> None:
        self._writer, self._console = writer, console
        self._names = run.data.categories
        self._zeros = ZeroWatch(list(flatten(run.parts.trainable)))
        self.noop = NoopWatch()

    def step(self, number: int, metrics: Mapping[str, Any], meter: Meter) -> float:
        """Record a step, of its metrics on the host; returns its loss.

        Raises:
            ValueError: an adapter had no gradient in the first steps.
        """
        row = step_row(metrics, self._names, meter)
        self._writer.write(number, row)
        if metrics["is_good"]:
            if "gradient_is_zero" in metrics and row["loss_tokens"]:
                zeros = metrics["leaf_is_zero"], metrics["gradient_is_zero"]
                self._zeros.look(*zeros)
            for line in self.noop.look(number, row):
                self._console.print(f"[yellow]{line}")
        return row["loss"]


def step_row(
    metrics: Mapping[str, Any], names: tuple[str, ...], meter: Meter
) -> dict[str, Any]:
    """One step's row, of its metrics on the host; `names` are the categories'."""
    sums = total_sums([metrics["sums"]], len(names))
    by_category = category_losses(sums, names)
    row = {
        "loss": float(metrics["loss"]),
        "tokens_per_s": meter.tokens_per_s,
        "data_wait_share": meter.data_share,
        "loss_tokens": float(sums.weight.sum()),
        "bad_in_row": int(metrics["bad_in_row"]),
        **{f"train/{k}/loss": v for k, v in by_category.items()},
        **{k: float(v) for k, v in metrics["report"].items()},
    }
    if "divergence" in metrics:
        row["tmkl"] = float(metrics["divergence"])
    return row


def evaluate(
    run: Run, trainable: Params, held: Frozen, *, each: Callable[[], None]
) -> dict[str, float]:
    """The held-out losses; `each` is called before every window, and may raise."""

    def eval_step(*arguments):
        each()
        trainable, held, batch = arguments
        if run.parts.layout:
            batch = run.parts.layout.put_whole(batch)
        return jax.block_until_ready(run.parts.eval_step(trainable, held, batch))

    return held_out_losses(
        eval_step,
        trainable,
        held,
        examples=run.data.eval_sft,
        text=run.data.eval_replay,
        categories=run.data.categories,
    )
