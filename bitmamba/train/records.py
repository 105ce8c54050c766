"""Rows of metrics.jsonl: a training step's, and the held-out losses."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from bitmamba.report.progress import Meter
from bitmamba.train.evaluate import held_out_losses
from bitmamba.train.metrics import category_losses, total_sums
from bitmamba.train.objective import Frozen
from bitmamba.train.prepare import Run
from bitmamba.types import Params


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
