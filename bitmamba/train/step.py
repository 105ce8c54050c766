"""The one training step, pure, for every mode; it does not know what is trained."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bitmamba.train.metrics import LossSums, add_sums, loss_sums
from bitmamba.train.state import TrainState
from bitmamba.types import Batch, Params

LossFn = Callable[[Params, Params, Batch], jax.Array]


def make_train_step(
    loss_fn: LossFn, update: Callable, *, n_categories: int
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, dict[str, Any]]]:
    """Build step(state, frozen, batch) -> (state, metrics).

    The objective is sum(weight * nll) / sum(weight) over all micro-batches, so every
    trainable token counts the same however the windows are split. If the loss or any
    gradient is not finite the update is skipped: parameters and optimiser state stay
    as they were, bit for bit.

    Args:
        loss_fn: (trainable, frozen, batch (B, L)) -> (B, L) float32 per-token loss.
        update: (grads, opt_state, params) -> (updates, opt_state, report), the
            `update` of `bitmamba.optim`.
        n_categories: number of categories in `batch.source_ids`.

    Returns:
        A function to be jitted, with state donated; batch fields are (M, B, L).
        metrics: "loss", "is_good", "leaf_is_finite" ((leaves,) bool, in the order of
        `jax.tree.leaves(state.trainable)`), "sums" (LossSums) and the report.
    """

    def step(state, frozen, batch):
        grads, sums = _gradients(loss_fn, n_categories, state.trainable, frozen, batch)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
        loss = sums.loss.sum() / jnp.maximum(sums.weight.sum(), 1e-30)
        is_good = finite.all() & jnp.isfinite(loss)

        def apply(operands):
            grads, opt_state, trainable = operands
            updates, opt_state, report = update(grads, opt_state, trainable)
            new = jax.tree.map(lambda p, u: p + u.astype(p.dtype), trainable, updates)
            return new, opt_state, report

        operands = (grads, state.opt_state, state.trainable)
        shapes = jax.eval_shape(apply, operands)[2]

        def skip(operands):
            _, opt_state, trainable = operands
            nothing = jax.tree.map(
                lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes
            )
            return trainable, opt_state, nothing

        trainable, opt_state, report = lax.cond(is_good, apply, skip, operands)
        bad = jnp.where(is_good, 0, 1).astype(jnp.int32)
        new_state = TrainState(
            step=state.step + 1,
            trainable=trainable,
            opt_state=opt_state,
            bad_in_row=jnp.where(is_good, 0, state.bad_in_row + 1),
            bad_total=state.bad_total + bad,
        )
        metrics = {
            "loss": loss,
            "is_good": is_good,
            "leaf_is_finite": finite,
            "bad_in_row": new_state.bad_in_row,
            "sums": sums,
            "report": report,
        }
        return new_state, metrics

    return step


def _gradients(loss_fn, n_categories, trainable, frozen, batch: Batch):
    """Sum of the micro-batches' gradients of the token-weighted mean loss."""
    total = batch.loss_weights.sum()
    scale = jnp.where(total > 0, 1.0 / jnp.maximum(total, 1e-30), 0.0)

    def objective(trainable, micro: Batch):
        nll = loss_fn(trainable, frozen, micro)
        value = (nll * micro.loss_weights).sum() * scale
        return value, loss_sums(nll, micro, n_categories)

    gradient = jax.grad(objective, has_aux=True)
    n_micro = batch.tokens.shape[0]
    if n_micro == 1:
        return gradient(trainable, jax.tree.map(lambda x: x[0], batch))

    def body(carry, micro):
        grads, sums = carry
        more_grads, more_sums = gradient(trainable, micro)
        grads = jax.tree.map(jnp.add, grads, more_grads)
        return (grads, add_sums(sums, more_sums)), None

    zeros = jax.tree.map(jnp.zeros_like, trainable)
    empty = LossSums(*(jnp.zeros((n_categories,), jnp.float32) for _ in range(2)))
    (grads, sums), _ = lax.scan(body, (zeros, empty), batch)
    return grads, sums
