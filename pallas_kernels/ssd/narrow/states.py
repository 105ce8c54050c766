"""The states without the outputs, and their gradients alone; see `tile`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.narrow import tile as tiles
from pallas_kernels.ssd.narrow.tile import Exchange, Place, Sizes


class _Forward(NamedTuple):
    x: tuple[jax.Array, ...]
    decay: tuple[jax.Array, ...]
    dtB: tuple[jax.Array, ...]


class _Backward(NamedTuple):
    dy: tuple[jax.Array, ...]
    decay: tuple[jax.Array, ...]
    C: tuple[jax.Array, ...]


def states(
    x: jax.Array, decay: jax.Array, dtB: jax.Array, start: jax.Array, sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """(states leaving the pieces, states entering the tiles), as of `forward.scan`."""
    s = sizes
    every = jax.ShapeDtypeStruct((s.b * s.tiles, s.channels), jnp.float32)
    body = functools.partial(_states_body, s=s)
    body.__name__ = "ssd_narrow_states"
    out_type = (jax.ShapeDtypeStruct(start.shape, jnp.float32), every)
    return tiles.call(body, out_type, s, 1)(x, decay, dtB, start)


def state_gradients(
    dy: jax.Array, decay: jax.Array, C: jax.Array, sizes: Sizes
) -> jax.Array:
    """What y of each piece sends to the state entering it, (B·pieces, H·P) float32."""
    s = sizes
    body = functools.partial(_gradients_body, s=s)
    body.__name__ = "ssd_narrow_state_gradients"
    out_type = jax.ShapeDtypeStruct((s.b * s.pieces, s.channels), jnp.float32)
    return tiles.call(body, out_type, s, 1)(dy, decay, C)


def _states_body(x_g, decay_g, dtb_g, start_g, end_g, states_g, *, s, ends, through):
    at, exchange = Place.here(s), Exchange(ends, through)

    def fetch(tile):
        head = at.head_tokens(tile)
        x = tiles.each(x_g, at.tokens(tile), at.channels)
        return _Forward(x, tiles.each(decay_g, head), tiles.each(dtb_g, head))

    def step(tile, slot, now, state):
        states_g[at.tile(tile), at.channels] = state
        exchange.put(slot, tiles.product(now.decay), tiles.walk(now, None)[-1])
        return exchange.get(slot, 0, state)[1]

    state = tiles.load(start_g.at[at.end, at.channels], tiles.BY_CHANNEL)
    end_g[at.end, at.channels] = tiles.along(at, fetch, step, state)


def _gradients_body(dy_g, decay_g, c_g, out_g, *, s, ends, through):
    at, exchange = Place.here(s), Exchange(ends, through)

    def fetch(tile):
        dy = tiles.each(dy_g, at.tokens(tile), at.channels)
        decay = tiles.each(decay_g, at.head_tokens(tile))
        return _Backward(dy, decay, tiles.each(c_g, at.group_tokens(tile)))

    def step(tile, slot, now, dstate):
        del tile
        exchange.put(slot, tiles.product(now.decay), tiles.sent_back(now, None))
        return exchange.get(slot, 0, dstate, reverse=True)[1]

    zeros = jnp.zeros((tiles.CHANNELS,), jnp.float32)
    dstate = tiles.plgpu.layout_cast(zeros, tiles.BY_CHANNEL)
    dstate = tiles.along(at, fetch, step, dstate, reverse=True)
    out_g[at.end, at.channels] = dstate
