"""Sums of the loss by category, and the means that are printed; pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba.types import Array, Batch


class LossSums(NamedTuple):
    """Per category: (C,) float32 sums of weight * nll, and of weight."""

    loss: Array
    weight: Array


def loss_sums(nll: jax.Array, batch: Batch, n_categories: int) -> LossSums:
    """Sum the per-token loss (B, L) by `batch.source_ids`.

    Tokens of weight 0 contribute nothing, whatever their loss (0 * NaN too).
    """
    weight = batch.loss_weights.astype(jnp.float32)
    value = jnp.where(weight > 0, nll * weight, 0.0)
    ids = batch.source_ids.reshape(-1)
    by_category = jax.ops.segment_sum
    return LossSums(
        by_category(value.reshape(-1), ids, num_segments=n_categories),
        by_category(weight.reshape(-1), ids, num_segments=n_categories),
    )


def total_sums(sums: Sequence[LossSums], n_categories: int) -> LossSums:
    """Sum over batches on the host, in float64."""
    loss, weight = np.zeros(n_categories), np.zeros(n_categories)
    for part in sums:
        loss += np.asarray(part.loss, np.float64)
        weight += np.asarray(part.weight, np.float64)
    return LossSums(loss, weight)


def mean_loss(sums: LossSums) -> float:
    """Token-weighted mean over all categories; NaN when there is no token."""
    weight = float(np.sum(sums.weight))
    return float(np.sum(sums.loss)) / weight if weight else math.nan


def category_losses(sums: LossSums, names: Sequence[str]) -> dict[str, float]:
    """{category: mean loss} of the categories that have tokens."""
    return {
        name: float(loss) / float(weight)
        for name, loss, weight in zip(names, sums.loss, sums.weight, strict=True)
        if weight > 0
    }
