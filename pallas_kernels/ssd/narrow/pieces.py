"""Rows cut into pieces that are walked along at once, where rows alone are too few.

A piece is walked along twice: from a zero state, for what it leaves to the next one;
then, with all pieces known, from the state that really enters it. That reads x (or dy)
once more, which only a GPU of much bandwidth gains by.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.ssd.narrow.tile import Sizes

# Thread blocks that A100 and H200 (108 and 132 multiprocessors) want; README.md counts.
_BLOCKS = 128
_MOST = 8
_WIDE = ((8, 0), (9, 0))


def count(sizes: Sizes) -> int:
    """Pieces of a row on the GPU that is the default device: a divisor of its tiles."""
    if backend.capability() not in _WIDE:
        return 1
    blocks = sizes.b * sizes.blocks
    fitting = [n for n in range(1, _MOST + 1) if not sizes.tiles % n]
    return max((n for n in fitting if n * blocks <= _BLOCKS), default=1)


def by_piece(ends: jax.Array, sizes: Sizes) -> jax.Array:
    """(B·pieces, H·P) -> (B, pieces, H, P)."""
    return ends.reshape(sizes.b, sizes.pieces, sizes.h, sizes.p)


def in_series(
    ends: jax.Array,
    decay: jax.Array,
    first: jax.Array,
    sizes: Sizes,
    *,
    reverse: bool = False,
) -> jax.Array:
    """What enters each piece, (B·pieces, H·P), from what each leaves of itself.

    Args:
        ends: (B·pieces, H·P), what leaves each piece if nothing enters it.
        decay: (B·H·L/n, n), of each token.
        first: (B, H, P), what enters the first piece; if reverse, the last.
    """
    s = sizes
    through = decay.reshape(s.b, s.h, s.pieces, -1).prod(3)
    ends, entering = by_piece(ends, s), [first]
    order = range(s.pieces)[::-1] if reverse else range(s.pieces)
    for n in order[:-1]:
        factor = through[:, :, n, None]
        passed = jnp.where(factor != 0, factor * entering[-1], 0)
        entering.append(passed + ends[:, n])
    entering = entering[::-1] if reverse else entering
    return jnp.stack(entering, 1).reshape(ends.shape[0] * s.pieces, -1)
