"""Documents in a packed row: a new one starts wherever the id changes."""

import jax
import jax.numpy as jnp


def run_numbers(segment_ids: jax.Array) -> jax.Array:
    """Number the runs of equal ids from 0, so that a repeated id is a new document.

    Args:
        segment_ids: (B, L) int.

    Returns:
        (B, L) int32, non-decreasing along L.
    """
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = jnp.zeros_like(segment_ids[:, :1], dtype=jnp.int32)
    return jnp.concatenate([first, jnp.cumsum(changed, axis=1, dtype=jnp.int32)], 1)
