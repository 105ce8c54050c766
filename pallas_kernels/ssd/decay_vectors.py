"""Decays as the kernels read them: vectors over tokens, made by XLA.

Softplus, clamp and running sums are 1 % of the traffic, and Mosaic has no log1p and no
cumulative sum. The kernels form exp(l_i - l_j) from the vectors themselves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ssd.decays import keep, log_sums, make_masks

# Order of the vectors of one chunk: every kernel reads a run of neighbours.
FROM_START, COARSE, FINE, DT, TO_END = range(5)
COUNT = 5


class DecayVectors(NamedTuple):
    """vectors: (B·H·C·5·Q,) float32. through: (B·H·C,) float32."""

    vectors: jax.Array
    through: jax.Array


def decay_vectors(dt, A, run, size: int) -> DecayVectors:
    """From dt (B, L, H) of whole chunks, A (H,) and run numbers (B, L), or None."""
    batch, length, heads = dt.shape
    chunks = length // size
    dt_chunks = dt.reshape(batch * chunks, size, heads)
    if run is None:
        masks = make_masks(None, None, size)
    else:
        by_chunk = run.reshape(batch, chunks, size)
        before = jnp.concatenate([by_chunk[:, :1, 0], by_chunk[:, :-1, -1]], 1)
        masks = make_masks(by_chunk.reshape(-1, size), before.reshape(-1), size)
    coarse, fine = log_sums(dt_chunks, A, masks)
    from_start = jnp.exp(coarse + fine)
    through = keep(masks.through, from_start[..., -1])
    from_start = keep(masks.from_start, from_start, axis=2)
    to_end = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)
    to_end = keep(masks.to_end, jnp.exp(jnp.minimum(to_end, 0)), axis=2)
    rows = (from_start, coarse, fine, dt_chunks.swapaxes(1, 2), to_end)
    vectors = jnp.stack(rows, 2).reshape(batch, chunks, heads, COUNT * size)
    through = through.reshape(batch, chunks, heads)
    return DecayVectors(vectors.swapaxes(1, 2).ravel(), through.swapaxes(1, 2).ravel())


def document_bounds(run: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Where in its chunk each token's document starts and ends, (B·L,) int32 each."""
    by_chunk = run.reshape(-1, size)
    edge = by_chunk[:, 1:] != by_chunk[:, :-1]
    at = jnp.arange(size, dtype=jnp.int32)
    starts = jnp.where(jnp.pad(edge, ((0, 0), (1, 0))), at, 0)
    ends = jnp.where(jnp.pad(edge, ((0, 0), (0, 1))), at, size - 1)
    start = lax.cummax(starts, axis=1)
    return start.ravel(), lax.cummin(ends, axis=1, reverse=True).ravel()
