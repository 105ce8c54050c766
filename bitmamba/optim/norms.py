"""Norms of gradients that neither overflow nor underflow on the way."""

from typing import Any

import jax
import jax.numpy as jnp

# Below this sum of squares single leaves may have lost theirs to underflow.
_SMALL = 1e-20


def sum_squares(x: jax.Array) -> jax.Array:
    """Sum of x², in float32."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def rms(x: jax.Array) -> jax.Array:
    """Root of the mean square, in float32."""
    return jnp.sqrt(sum_squares(x) / x.size)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)))


def _scaled_norm(x: jax.Array) -> jax.Array:
    """‖x‖₂ through x / max|x|: right for 1e20 and 1e-30; inf and NaN stay visible."""
    largest = _largest(x)
    divisor = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    norm = divisor * jnp.sqrt(sum_squares(x.astype(jnp.float32) / divisor))
    return jnp.where(jnp.isfinite(largest), norm, largest)


def leaf_norms(tree: Any, *, norm: str = "l2", clamp: float | None = None) -> Any:
    """The norm of every leaf.

    Args:
        tree: gradients.
        norm: "l2" or "inf".
        clamp: limit the elements to [-clamp, clamp] first.

    Returns:
        A tree of float32 scalars; inf or NaN where the leaf has such elements.

    Numerics: plain float32 sums of squares; only when their total is not finite or
        below 1e-20 (norm 1e-10) is each leaf divided by its largest element first.
    """

    def clamped(x):
        return x if clamp is None else jnp.clip(x, -clamp, clamp)

    if norm == "inf":
        return jax.tree.map(lambda x: _largest(clamped(x)), tree)
    sums = jax.tree.map(lambda x: sum_squares(clamped(x)), tree)
    total = sum(jax.tree.leaves(sums))
    return jax.lax.cond(
        jnp.isfinite(total) & (total > _SMALL),
        lambda tree, sums: jax.tree.map(jnp.sqrt, sums),
        lambda tree, sums: jax.tree.map(lambda x: _scaled_norm(clamped(x)), tree),
        tree,
        sums,
    )


def join_norms(norms: Any, *, norm: str = "l2") -> jax.Array:
    """The norm of several leaves together, from a tree of their own norms."""
    stacked = jnp.stack(jax.tree.leaves(norms))
    return jnp.max(stacked) if norm == "inf" else _scaled_norm(stacked)
