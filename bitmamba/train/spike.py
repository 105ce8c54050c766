"""Loss spikes by one rule, pure; what it compares with takes in good losses only."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WINDOW = 128


class SpikeRule(NamedTuple):
    """A loss above the mean by more than `sigmas` deviations and more than `rise`."""

    sigmas: float
    rise: float


class LossHistory(NamedTuple):
    """The last good losses. losses: (WINDOW,) float32, a ring; count: () int32."""

    losses: jax.Array
    count: jax.Array


def no_history() -> LossHistory:
    """Before the first good loss."""
    return LossHistory(jnp.zeros(WINDOW, jnp.float32), jnp.zeros((), jnp.int32))


def spike_limit(history: LossHistory, rule: SpikeRule) -> jax.Array:
    """() float32: the loss above which a step is a spike; inf until half is known."""
    n = jnp.minimum(history.count, WINDOW)
    known = jnp.arange(WINDOW) < n
    size = jnp.maximum(n, 1)
    mean = jnp.where(known, history.losses, 0.0).sum() / size
    square = jnp.where(known, jnp.square(history.losses - mean), 0.0).sum() / size
    limit = mean + jnp.maximum(rule.sigmas * jnp.sqrt(square), rule.rise)
    return jnp.where(n >= WINDOW // 2, limit, jnp.inf)


def remember(history: LossHistory, loss: jax.Array, take: jax.Array) -> LossHistory:
    """The history with one more loss if `take`; else the very same bits."""
    at = history.count % WINDOW
    value = jnp.where(take, loss, history.losses[at])
    return LossHistory(
        history.losses.at[at].set(value), history.count + take.astype(jnp.int32)
    )
