"""The one training step, pure, for every mode; it does not know what is trained."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bitmamba.train.metrics import loss_sums
from bitmamba.train.spike import SpikeRule, remember, spike_limit
from bitmamba.train.state import TrainState
from bitmamba.types import Batch, Params


class TokenLoss(NamedTuple):
    """Per token, (B, L) float32: the loss, and a divergence from the base or None."""

    nll: jax.Array
    divergence: jax.Array | None = None


class Pull(NamedTuple):
    """How far to go back towards `start(frozen)` after each update.

    θ ← θ + min(1, strength · (1 + divergence)) · (start - θ)
    """

    strength: float
    start: Callable[[Any], Params]


# (trainable, frozen, batch, key), and what `ready` made if the step has it.
LossFn = Callable[..., TokenLoss]


def make_train_step(
    loss_fn: LossFn,
    update: Callable,
    *,
    n_categories: int,
    divergence_weight: float = 0.0,
    pull: Pull | None = None,
    hyper: Callable[[Any], Any] | None = None,
    seed: int = 0,
    watch_zeros: bool = False,
    spike: SpikeRule | None = None,
    compute: Callable | None = None,
    ready: Callable[[Params, Any], Any] | None = None,
    keep: Callable[[Params], Params] | None = None,
    add: Callable[..., Params] | None = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Any]]]:
    """Build step(state, frozen, batch) -> (state, metrics).

    The objective is sum(weight * (nll + divergence_weight * divergence)) / sum(weight)
    over all micro-batches, so every trainable token counts the same however the windows
    are split. If the loss, the divergence, any gradient or any figure of the update's
    report is not finite, or the loss is a spike, the update is skipped: parameters,
    optimiser state and loss history stay as they were, bit for bit.

    Args:
        loss_fn: (trainable, frozen, batch (B, L), key[, ready]) -> TokenLoss.
        update: (grads, opt_state, params[, hyper]) -> (updates, opt_state, report),
            the `update` of `bitmamba.optim`.
        n_categories: number of categories in `batch.source_ids`.
        divergence_weight: of the divergence in the objective.
        pull: go back towards the start after each good update, or not.
        hyper: frozen -> what the update gets as `hyper`; None gives it none.
        seed: of the keys that loss_fn gets, one for each step and micro-batch.
        watch_zeros: also return which leaves and gradients are exactly zero.
        spike: which losses are spikes; None calls none so.
        compute: what stands in for `gradients`, as over many devices; None is it.
        ready: (trainable, frozen) -> what the loss needs of them whatever the batch is.
            With several micro-batches it is made once and given to loss_fn, as data:
            no gradient goes through it. None leaves all to loss_fn.
        keep: gradients -> the same in the dtypes in which they are kept and summed;
            None keeps them as they come.
        add: (params, updates, key=…) -> params, for parameters that are not float32;
            update then sees them in float32. None adds in the parameters' dtype.

    Returns:
        A function to be jitted, with state donated; batch fields are (M, B, L).
        metrics: "loss", "is_good", "leaf_is_finite" ((leaves,) bool, in the order of
        `jax.tree.leaves(state.trainable)`), "update_is_finite", "spike_limit" (inf
        without a rule), "bad_in_row", "sums" (LossSums), the report, with a
        divergence its mean "divergence", and with watch_zeros "leaf_is_zero" and
        "gradient_is_zero", (leaves,) bool, before the update.
    """

    compute = compute or gradients

    def step(state, frozen, batch):
        grads, sums, divergence = compute(
            loss_fn,
            state.trainable,
            frozen,
            batch,
            n_categories=n_categories,
            divergence_weight=divergence_weight,
            ready=ready,
            keep=keep,
            key=jax.random.fold_in(jax.random.key(seed), state.step),
        )
        params = state.trainable
        if keep is not None or add is not None:
            # Else XLA leaves the rounding out, and keeps what it should not.
            grads = lax.optimization_barrier(grads)
        if add is not None:
            params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
        loss = sums.loss.sum() / jnp.maximum(sums.weight.sum(), 1e-30)
        is_good = finite.all() & jnp.isfinite(loss)
        if divergence is not None:
            is_good &= jnp.isfinite(divergence)
        given = () if hyper is None else (hyper(frozen),)
        updates, opt_state, report = update(grads, state.opt_state, params, *given)
        # Norms of all updates are in it, so a finite report means finite parameters.
        update_is_finite = _all_finite(report)
        is_good &= update_is_finite
        limit = jnp.inf if spike is None else spike_limit(state.history, spike)
        is_good &= ~(loss > limit)
        # The report reads the old values: done before they are overwritten in place.
        old, report = lax.optimization_barrier((state.trainable, report))
        if add is None:
            trainable = jax.tree.map(lambda p, u: p + u.astype(p.dtype), old, updates)
        else:
            trainable = add(old, updates, key=_rounding_key(seed, state.step))
        if pull is not None:
            trainable = _pulled(trainable, pull, frozen, divergence)
        # A choice of values, not a branch: each array is then updated in its place,
        # where a conditional would hold all new ones beside the old.
        new = TrainState(
            step=state.step + 1,
            trainable=_where(is_good, trainable, old),
            opt_state=_where(is_good, opt_state, state.opt_state),
            bad_in_row=jnp.where(is_good, 0, state.bad_in_row + 1),
            bad_total=state.bad_total + jnp.where(is_good, 0, 1).astype(jnp.int32),
            # A step without a token to train has no loss to compare with.
            history=remember(state.history, loss, is_good & (sums.weight.sum() > 0)),
        )
        metrics = {
            "loss": loss,
            "is_good": is_good,
            "leaf_is_finite": finite,
            "update_is_finite": update_is_finite,
            "spike_limit": limit,
            "bad_in_row": new.bad_in_row,
            "sums": sums,
            "report": _where(is_good, report, jax.tree.map(lambda _: jnp.nan, report)),
        }
        if divergence is not None:
            metrics["divergence"] = divergence
        if watch_zeros:
            metrics["leaf_is_zero"] = _zeros(state.trainable)
            metrics["gradient_is_zero"] = _zeros(grads)
        return new, metrics

    return step


def _rounding_key(seed: int, step: jax.Array) -> jax.Array:
    """Of one step; no loss_fn gets this one."""
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), ~step)


def _all_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _where(is_good: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)


def _pulled(trainable: Params, pull: Pull, frozen: Any, divergence) -> Params:
    rate = jnp.minimum(1.0, pull.strength * (1.0 + divergence))
    start = pull.start(frozen)
    return jax.tree.map(lambda p, s: p + rate * (s - p), trainable, start)


def _zeros(tree) -> jax.Array:
    """(leaves,) bool: which leaves hold nothing but zeros."""
    return jnp.stack([~jnp.any(leaf) for leaf in jax.tree.leaves(tree)])


def gradients(
    loss_fn,
    trainable,
    frozen,
    batch: Batch,
    *,
    n_categories,
    divergence_weight,
    key,
    ready: Callable | None = None,
    keep: Callable | None = None,
    over: tuple[str, ...] = (),
):
    """Gradients of the token-weighted mean over all micro-batches, and its parts.

    Args:
        ready, keep: as for `make_train_step`.
        over: mesh axes that the rows are spread over; the mean is over all rows, the
            results are this device's share of the sums.

    Returns:
        (gradients, LossSums, mean divergence or None).
    """
    total = batch.loss_weights.sum()
    if over:
        total = lax.psum(total, over)
    scale = jnp.where(total > 0, 1.0 / jnp.maximum(total, 1e-30), 0.0)

    n_micro = batch.tokens.shape[0]
    made = (ready(trainable, frozen),) if ready is not None and n_micro > 1 else ()

    def objective(trainable, micro: Batch, key):
        nll, divergence = loss_fn(trainable, frozen, micro, key, *made)
        value = (nll * micro.loss_weights).sum() * scale
        if divergence is not None:
            divergence = (divergence * micro.loss_weights).sum() * scale
            if divergence_weight:
                value = value + divergence_weight * divergence
        return value, (loss_sums(nll, micro, n_categories), divergence)

    gradient = jax.grad(objective, has_aux=True)

    def kept(trainable, micro: Batch, key):
        grads, others = gradient(trainable, micro, key)
        return grads if keep is None else keep(grads), others

    if n_micro == 1:
        micro = jax.tree.map(lambda x: x[0], batch)
        grads, (sums, divergence) = kept(trainable, micro, key)
        return grads, sums, divergence

    def body(carry, micro_and_key):
        more = gradient(trainable, *micro_and_key)
        # Where the sum is kept narrower than what is added, it is rounded once.
        return jax.tree.map(lambda c, m: (c + m).astype(c.dtype), carry, more), None

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n_micro))
    first = jax.tree.map(lambda x: x[0], (batch, keys))
    shapes = jax.eval_shape(kept, trainable, *first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (grads, (sums, divergence)), _ = lax.scan(body, zeros, (batch, keys))
    return grads, sums, divergence
