"""Decays inside one chunk: exact differences of log decays, and the document masks.

A log decay `a = dt·A` may be -1e7 at one token and -1e-6 at the next. A float32 running
sum loses the small one, and with it the difference of two sums. So each `a` is split
into a coarse part, a multiple of a power of two such that every sum over a chunk is
exact, and the fine rest. Differences of the coarse sums are then exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# exp() of less than this is zero, also after the deepest subnormal.
_FLOOR = {"float32": -128.0, "float64": -1024.0}


class Masks(NamedTuple):
    """Which tokens of a chunk see what; None stands for "all of them".

    pair: (B or 1, Q, Q), j <= i and both in one document.
    from_start: (B, Q), the token's document is the one entering the chunk.
    to_end: (B, Q), the token's document is the one leaving the chunk.
    through: (B,), the entering document leaves the chunk.
    """

    pair: jax.Array
    from_start: jax.Array | None
    to_end: jax.Array | None
    through: jax.Array | None


class Decays(NamedTuple):
    """Factors <= 1, wide dtype; zero wherever a document boundary lies between.

    pair: (B, H, Q, Q), exp(l_i - l_j), clamped at 1: above the diagonal and between
        documents it is meaningless and must meet a zero or a mask.
    from_start: (B, H, Q), from the state entering the chunk to token i.
    to_end: (B, H, Q), from token j to the state leaving the chunk.
    through: (B, H), across the whole chunk.
    """

    pair: jax.Array
    from_start: jax.Array
    to_end: jax.Array
    through: jax.Array


def lower(size: int, dtype: jnp.dtype, *, strict: bool = False) -> jax.Array:
    """(size, size) of ones at j <= i, or at j < i."""
    return jnp.tril(jnp.ones((size, size), dtype), -1 if strict else 0)


def keep(mask: jax.Array | None, values: jax.Array, *, axis: int = 1) -> jax.Array:
    """`values` where the mask holds, exact zeros elsewhere; all if the mask is None.

    mask is (B,), or (B, Q) with Q at `axis` of the values.
    """
    if mask is None:
        return values
    shape = [1] * values.ndim
    shape[0] = mask.shape[0]
    if mask.ndim == 2:
        shape[axis] = mask.shape[1]
    return jnp.where(mask.reshape(shape), values, 0)


def make_masks(run: jax.Array | None, run_before: jax.Array | None, size: int) -> Masks:
    """Masks from run numbers (B, Q) and the run before the chunk; None: one run."""
    causal = lower(size, jnp.bool_)[None]
    if run is None:
        return Masks(causal, None, None, None)
    pair = causal & (run[:, :, None] == run[:, None, :])
    last = run[:, -1]
    return Masks(
        pair, run == run_before[:, None], run == last[:, None], last == run_before
    )


def log_sums(dt: jax.Array, A: jax.Array, masks: Masks) -> list[jax.Array]:
    """Sums of log decays up to each token of its document, (B, H, Q): coarse, fine."""
    size, wide = dt.shape[1], dt.dtype
    floor = _FLOOR[wide.name]
    log_decay = jnp.maximum(dt * A, floor)
    unit = _exact_unit(size, wide)
    coarse = jnp.round(log_decay / unit) * unit
    # The running sums are products with a triangle of ones: XLA:CPU would inline a
    # cumsum into the Q x Q loop below. They restart at each document, so that no
    # rounding depends on a neighbour's values.
    ones = jnp.broadcast_to(masks.pair.astype(wide), (dt.shape[0], size, size))
    sums = [
        jnp.einsum("bij,bjh->bhi", ones, part, precision=lax.Precision.HIGHEST)
        for part in (coarse, log_decay - coarse)
    ]
    return lax.optimization_barrier(sums)


def make_decays(dt: jax.Array, A: jax.Array, masks: Masks) -> Decays:
    """Every decay of one chunk from dt (B, Q, H) and A (H,)."""
    coarse, fine = log_sums(dt, A, masks)

    pair = jnp.exp(
        jnp.minimum(
            (coarse[..., :, None] - coarse[..., None, :])
            + (fine[..., :, None] - fine[..., None, :]),
            0,
        )
    )
    to_end = jnp.exp(
        jnp.minimum((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine), 0)
    )
    from_start = jnp.exp(coarse + fine)
    return Decays(
        pair,
        keep(masks.from_start, from_start, axis=2),
        keep(masks.to_end, to_end, axis=2),
        keep(masks.through, from_start[..., -1]),
    )


def _exact_unit(size: int, wide: jnp.dtype) -> float:
    """The finest power of two whose multiples add up exactly over a chunk."""
    largest_sum = -_FLOOR[wide.name] * size
    digits = jnp.finfo(wide).nmant
    unit = 2.0**-digits
    while unit * 2.0**digits < largest_sum:
        unit *= 2
    return unit
