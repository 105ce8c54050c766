"""Norms of gradients that neither overflow nor underflow on the way."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# Outside of these sums of squares some square may have been lost or infinite; the
# factor brings every float32 gradient of that side back inside.
_SMALL, _SMALL_FACTOR = 1e-20, 2.0**64
_LARGE_FACTOR = 2.0**-80


def sum_squares(x: jax.Array) -> jax.Array:
    """Sum of x², in float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def rms(x: jax.Array) -> jax.Array:
    """Root of the mean square, in float32."""
    return jnp.sqrt(sum_squares(x) / x.size)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)))


def _scaled_norm(x: jax.Array) -> jax.Array:
    """‖x‖₂ of a few values of any size; inf and NaN stay visible.

    Scaled by powers of two and not by max|x|: XLA makes x / scalar into a product
    with the reciprocal, which is zero for 3e38.
    """
    largest = _largest(x)
    small = jnp.where(largest < 2.0**-40, _SMALL_FACTOR, 1.0)
    factor = jnp.where(largest > 2.0**40, _LARGE_FACTOR, small)
    return jnp.sqrt(sum_squares(x * factor)) / factor


@functools.partial(jax.jit, static_argnames=("norm", "clamp"))
def leaf_norms(tree: Any, *, norm: str = "l2", clamp: float | None = None) -> Any:
    """The norm of every leaf.

    Args:
        tree: gradients.
        norm: "l2" or "inf".
        clamp: limit the elements to [-clamp, clamp] first.

    Returns:
        A tree of float32 scalars; inf or NaN where the leaf has such elements.

    Numerics: float32 sums of squares. Only when their total is not finite, or below
        1e-20 (norm 1e-10), they are taken once more of gradients times a power of 2.
        A loop, and not two branches, so that the sums are compiled only once.
    """

    limit = jnp.inf if clamp is None else clamp
    if norm == "inf":
        return jax.tree.map(lambda x: jnp.minimum(_largest(x), limit), tree)

    def clamped(x):
        x = x.astype(jnp.float32)
        return x if clamp is None else jnp.clip(x, -limit, limit)

    def more(carry):
        return carry[0] < 2

    def sums_of_squares(carry):
        tries, factor, _ = carry
        sums = jax.tree.map(lambda x: sum_squares(clamped(x) * factor), tree)
        total = sum(jax.tree.leaves(sums))
        good = jnp.isfinite(total) & (total > _SMALL)
        # The factor that these sums were taken with stays if they are good or last.
        last = good | (tries == 1)
        other = jnp.where(total <= _SMALL, _SMALL_FACTOR, _LARGE_FACTOR)
        return jnp.where(last, 2, 1), jnp.where(last, factor, other), sums

    start = (jnp.int32(0), jnp.float32(1), jax.tree.map(lambda _: jnp.float32(0), tree))
    _, factor, sums = jax.lax.while_loop(more, sums_of_squares, start)
    return jax.tree.map(lambda s: jnp.sqrt(s) / factor, sums)


def join_norms(norms: Any, *, norm: str = "l2") -> jax.Array:
    """The norm of several leaves together, from a tree of their own norms."""
    stacked = jnp.stack(jax.tree.leaves(norms))
    return jnp.max(stacked) if norm == "inf" else _scaled_norm(stacked)
