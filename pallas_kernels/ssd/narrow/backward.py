"""Every gradient of the recurrence in one walk from the last tile to the first.

Z_t = dL/dS_t = C_t dy_t + decay_{t+1} Z_{t+1}. Within a tile the states are walked
once more, forwards, from the state that entered it; no decay is ever divided by.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
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
    dfinal: jax.Array,
    sizes: Sizes,
) -> tuple[jax.Array, ...]:
    """(dx like x, dinitial (B, H·P), dD (B·4, H·P), added, read, crossing).

    Args:
        x, dy: (B·L/n, n, H·P).
        decay, dtB, C, D: as `forward.scan` takes them.
        states: (B·tiles, H·P) float32, entering each tile.
        dfinal: (B, H·P) float32.

    Of the last three, (B·blocks·L/n, n) float32 each, sums over a block's channels:
    added is x_t Z_t, for dt and B; read is S_t dy_t, for C; crossing is
    Z_t decay_t S_{t-1}, the gradient of the log decay, in which nothing cancels.
    """
    s = sizes
    channels = s.h * s.p
    sums = jax.ShapeDtypeStruct((s.blocks * x.shape[0], s.stretch), jnp.float32)
    body = functools.partial(_body, s=s)
    body.__name__ = "ssd_narrow_gradients"
    run = mosaic.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((s.b, channels), jnp.float32),
            jax.ShapeDtypeStruct((s.b * tiles.WARPS, channels), jnp.float32),
            sums,
            sums,
            sums,
        ],
        grid=(s.blocks, s.b),
        grid_names=("block", "b"),
        scratch_types=Exchange.scratch(2),
        compiler_params=mosaic.WRITES_ONLY,
    )
    return run(x, dy, decay, dtB, C, D, states, dfinal)


def _body(*refs, s, ends, through):
    x_g, dy_g, decay_g, dtb_g, c_g, d_g, states_g, dfinal_g, *refs = refs
    dx_g, dstart_g, dd_g, added_g, read_g, crossing_g = refs
    at, exchange = Place.here(s), Exchange(ends, through)
    skip = tiles.spread(tiles.load(d_g.at[at.channels], tiles.BY_CHANNEL))

    def fetch(tile):
        own, head, group = at.tokens(tile), at.head_tokens(tile), at.group_tokens(tile)
        state = states_g.at[at.b * s.tiles + tile, at.channels]
        return _Tokens(
            tiles.each(x_g, own, at.channels),
            tiles.each(dy_g, own, at.channels),
            tiles.each(decay_g, head),
            tiles.each(dtb_g, head),
            tiles.each(c_g, group),
            tiles.load(state, tiles.BY_CHANNEL),
        )

    def one(step, carry):
        dstate, dD, now = carry
        tile = s.tiles - 1 - step
        ahead = fetch(lax.max(tile - 1, 0))
        slot = lax.rem(step, 2)
        left = tiles.walk(now, None)[-1]
        exchange.put(slot, tiles.product(now.decay), left, _sent_back(now))
        entering, _ = exchange.get(slot, 0, now.state)
        after, dstate = exchange.get(slot, 1, dstate, reverse=True)
        out = dx_g, added_g, read_g, crossing_g
        dD = dD + _gradients(now, entering, after, skip, out, at, tile)
        return dstate, dD, ahead

    dstate = tiles.load(dfinal_g.at[at.b, at.channels], tiles.BY_CHANNEL)
    carry = (dstate, tiles.zeros(), fetch(s.tiles - 1))
    dstate, dD, _ = lax.fori_loop(0, s.tiles, one, carry)
    dstart_g[at.b, at.channels] = dstate
    dd_g[tiles.ds(at.b * tiles.WARPS, tiles.WARPS), at.channels] = dD


def _sent_back(now):
    """What the tokens of a stretch alone send to the state before it."""
    dstate = None
    for dy, decay, C in zip(now.dy[::-1], now.decay[::-1], now.C[::-1], strict=True):
        dafter = tiles.spread(C) * tiles.wide(dy)
        if dstate is not None:
            dafter = dafter + dstate
        dstate = tiles.passed(tiles.spread(decay), dafter)
    return dstate


def _gradients(now, state, dstate, skip, out, at, tile):
    """Write the tile's gradients; returns its part of dD.

    state: entering the stretches. dstate: of the states leaving them, from the right.
    """
    dx_g, added_g, read_g, crossing_g = out
    own, block, dD = at.tokens(tile), at.block_tokens(tile), tiles.zeros()
    decayed = []
    for x, decay, dtB in zip(now.x, now.decay, now.dtB, strict=True):
        decayed.append(tiles.passed(tiles.spread(decay), state))
        state = decayed[-1] + tiles.spread(dtB) * tiles.wide(x)
    for j in range(len(now.x))[::-1]:
        x, dy, dtB = (
            tiles.wide(now.x[j]),
            tiles.wide(now.dy[j]),
            tiles.spread(now.dtB[j]),
        )
        z = dstate + tiles.spread(now.C[j]) * dy
        dx_g[own, j, at.channels] = (dtB * z + skip * dy).astype(dx_g.dtype)
        added_g[block, j] = jnp.sum(x * z, axis=1)
        read_g[block, j] = jnp.sum((decayed[j] + dtB * x) * dy, axis=1)
        crossing_g[block, j] = jnp.sum(decayed[j] * z, axis=1)
        dstate = tiles.passed(tiles.spread(now.decay[j]), z)
        dD = dD + x * dy
    return dD
