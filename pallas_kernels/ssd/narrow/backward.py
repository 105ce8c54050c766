"""Every gradient of the recurrence in one walk from the last tile to the first.

Z_t = dL/dS_t = C_t dy_t + decay_{t+1} Z_{t+1}. Within a tile the states are walked
once more, forwards, from the state that entered it; no decay is ever divided by.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.narrow import tile as tiles
from pallas_kernels.ssd.narrow.tile import Exchange, Place, Sizes


class _Tokens(NamedTuple):
    """A stretch's tokens in order, and the state (128,) entering the tile."""

    x: tuple[jax.Array, ...]
    dy: tuple[jax.Array, ...]
    decay: tuple[jax.Array, ...]
    dtB: tuple[jax.Array, ...]
    C: tuple[jax.Array, ...]
    state: jax.Array


def gradients(
    x: jax.Array,
    dy: jax.Array,
    decay: jax.Array,
    dtB: jax.Array,
    C: jax.Array,
    D: jax.Array,
    states: jax.Array,
    dend: jax.Array,
    sizes: Sizes,
) -> tuple[jax.Array, ...]:
    """(dx like x, dstart like dend, dD (B·pieces·4, H·P), added, read, crossing).

    Args:
        x, dy: (B·L/n, n, H·P).
        decay, dtB, C, D: as `forward.scan` takes them.
        states: (B·tiles, H·P) float32, entering each tile.
        dend: (B·pieces, H·P) float32, gradient of the state leaving each piece.

    Of the last three, (B·blocks·L/n, n) float32 each, sums over a block's channels:
    added is x_t Z_t, for dt and B; read is S_t dy_t, for C; crossing is
    Z_t decay_t S_{t-1}, the gradient of the log decay, in which nothing cancels.
    """
    s = sizes
    sums = jax.ShapeDtypeStruct((s.blocks * x.shape[0], s.stretch), jnp.float32)
    by_warp = (len(dend) * tiles.WARPS, s.channels)
    out_type = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(dend.shape, jnp.float32),
        jax.ShapeDtypeStruct(by_warp, jnp.float32),
        *[sums] * 3,
    ]
    body = functools.partial(_body, s=s)
    body.__name__ = "ssd_narrow_gradients"
    run = tiles.call(body, out_type, s, 2)
    return run(x, dy, decay, dtB, C, D, states, dend)


def _body(*refs, s, ends, through):
    x_g, dy_g, decay_g, dtb_g, c_g, d_g, states_g, dend_g, *refs = refs
    dx_g, dstart_g, dd_g, *sums_g = refs
    at, exchange = Place.here(s), Exchange(ends, through)
    skip = tiles.spread(tiles.load(d_g.at[at.channels], tiles.BY_CHANNEL))

    def fetch(tile):
        own, head, group = at.tokens(tile), at.head_tokens(tile), at.group_tokens(tile)
        return _Tokens(
            tiles.each(x_g, own, at.channels),
            tiles.each(dy_g, own, at.channels),
            tiles.each(decay_g, head),
            tiles.each(dtb_g, head),
            tiles.each(c_g, group),
            tiles.load(states_g.at[at.tile(tile), at.channels], tiles.BY_CHANNEL),
        )

    def step(tile, slot, now, carry):
        dstate, dD = carry
        left, sent = tiles.walk(now, None)[-1], tiles.sent_back(now, None)
        exchange.put(slot, tiles.product(now.decay), left, sent)
        entering, _ = exchange.get(slot, 0, now.state)
        after, dstate = exchange.get(slot, 1, dstate, reverse=True)
        out = (dx_g.at[at.tokens(tile)], *(t.at[at.block_tokens(tile)] for t in sums_g))
        return dstate, dD + _gradients(now, entering, after, skip, at.channels, *out)

    dstate = tiles.load(dend_g.at[at.end, at.channels], tiles.BY_CHANNEL)
    carry = (dstate, tiles.zeros())
    dstate, dD = tiles.along(at, fetch, step, carry, reverse=True)
    dstart_g[at.end, at.channels] = dstate
    dd_g[tiles.ds(at.end * tiles.WARPS, tiles.WARPS), at.channels] = dD


def _gradients(now, state, dstate, skip, channels, dx_g, added_g, read_g, crossing_g):
    """Write the gradients of a tile; returns its part of dD.

    state: entering the stretches. dstate: of the states leaving them, from the right.
    """
    decayed, dD = [], tiles.zeros()
    for x, decay, dtB in zip(now.x, now.decay, now.dtB, strict=True):
        decayed.append(tiles.passed(tiles.spread(decay), state))
        state = decayed[-1] + tiles.spread(dtB) * tiles.wide(x)
    for j in range(len(now.x))[::-1]:
        x, dy = tiles.wide(now.x[j]), tiles.wide(now.dy[j])
        decay, dtB, C = (tiles.spread(t[j]) for t in (now.decay, now.dtB, now.C))
        z = dstate + C * dy
        dx_g[:, j, channels] = (dtB * z + skip * dy).astype(dx_g.dtype)
        added_g[:, j] = jnp.sum(x * z, axis=1)
        read_g[:, j] = jnp.sum((decayed[j] + dtB * x) * dy, axis=1)
        crossing_g[:, j] = jnp.sum(decayed[j] * z, axis=1)
        dstate, dD = tiles.passed(decay, z), dD + x * dy
    return dD
