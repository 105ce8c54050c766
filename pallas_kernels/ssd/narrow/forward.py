"""Outputs of the recurrence, and the states that its gradient wants; see `tile`.

S_t = decay_t S_{t-1} + dtB_t x_t,  y_t = C_t S_t + D x_t. Each element of x is read
once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.narrow import tile as tiles
from pallas_kernels.ssd.narrow.tile import Exchange, Place, Sizes


class _Tokens(NamedTuple):
    """A stretch's tokens in order, each for all four stretches."""

    x: tuple[jax.Array, ...]
    decay: tuple[jax.Array, ...]
    dtB: tuple[jax.Array, ...]
    C: tuple[jax.Array, ...]


def scan(
    x: jax.Array,
    decay: jax.Array,
    dtB: jax.Array,
    C: jax.Array,
    D: jax.Array,
    start: jax.Array,
    sizes: Sizes,
    *,
    keep_states: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(y like x, states leaving the pieces like start, states or None).

    Args:
        x: (B·L/n, n, H·P), n tokens to a stretch.
        decay, dtB: (B·H·L/n, n) float32.
        C: (B·G·L/n, n) float32.
        D: (H·P,) float32.
        start: (B·pieces, H·P) float32, the state entering each piece.
        keep_states: whether the state entering each tile is wanted, (B·tiles, H·P)
            float32.
    """
    s = sizes
    out_type = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(start.shape, jnp.float32),
    ]
    if keep_states:
        out_type += [jax.ShapeDtypeStruct((s.b * s.tiles, s.channels), jnp.float32)]
    body = functools.partial(_body, s=s)
    body.__name__ = "ssd_narrow_scan"
    out = tiles.call(body, out_type, s, 1)(x, decay, dtB, C, D, start)
    return *out, *([] if keep_states else [None])


def _body(*refs, s, ends, through):
    x_g, decay_g, dtb_g, c_g, d_g, start_g, y_g, end_g, *states_g = refs
    at, exchange = Place.here(s), Exchange(ends, through)
    skip = tiles.spread(tiles.load(d_g.at[at.channels], tiles.BY_CHANNEL))

    def fetch(tile):
        own, head, group = at.tokens(tile), at.head_tokens(tile), at.group_tokens(tile)
        return _Tokens(
            tiles.each(x_g, own, at.channels),
            tiles.each(decay_g, head),
            tiles.each(dtb_g, head),
            tiles.each(c_g, group),
        )

    def step(tile, slot, now, state):
        for ref in states_g:
            ref[at.tile(tile), at.channels] = state
        exchange.put(slot, tiles.product(now.decay), tiles.walk(now, None)[-1])
        entering, state = exchange.get(slot, 0, state)
        for j, inside in enumerate(tiles.walk(now, entering)):
            y = tiles.spread(now.C[j]) * inside + skip * tiles.wide(now.x[j])
            y_g[at.tokens(tile), j, at.channels] = y.astype(y_g.dtype)
        return state

    state = tiles.load(start_g.at[at.end, at.channels], tiles.BY_CHANNEL)
    end_g[at.end, at.channels] = tiles.along(at, fetch, step, state)
