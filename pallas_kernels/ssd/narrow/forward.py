"""The recurrence, and the states that its gradient wants; see `tile`.

S_t = decay_t S_{t-1} + dtB_t x_t,  y_t = C_t S_t + D x_t. Each element of x is read
once, straight into registers and a tile ahead.
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
    """A stretch's tokens in order, each for all four stretches; C is None without y."""

    x: tuple[jax.Array, ...]
    decay: tuple[jax.Array, ...]
    dtB: tuple[jax.Array, ...]
    C: tuple[jax.Array, ...] | None


def scan(
    x: jax.Array,
    decay: jax.Array,
    dtB: jax.Array,
    C: jax.Array | None,
    D: jax.Array | None,
    initial_state: jax.Array,
    sizes: Sizes,
    *,
    keep_states: bool,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """(y like x or None, states (B·tiles, H·P) or None, final state (B, H·P)).

    Args:
        x: (B·L/n, n, H·P), n tokens to a stretch.
        decay, dtB: (B·H·L/n, n) float32.
        C: (B·G·L/n, n) float32; None for states alone.
        D: (H·P,) float32; None with C.
        initial_state: (B, H·P) float32.
        keep_states: whether the state entering each tile is wanted.
    """
    s, wants_y = sizes, C is not None
    channels = s.h * s.p
    out_type = [jax.ShapeDtypeStruct((s.b, channels), jnp.float32)]
    if keep_states:
        out_type += [jax.ShapeDtypeStruct((s.b * s.tiles, channels), jnp.float32)]
    if wants_y:
        out_type += [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    body = functools.partial(_body, s=s, wants_y=wants_y, keep_states=keep_states)
    body.__name__ = "ssd_narrow_scan" if wants_y else "ssd_narrow_states"
    run = mosaic.kernel(
        body,
        out_type=out_type,
        grid=(s.blocks, s.b),
        grid_names=("block", "b"),
        scratch_types=Exchange.scratch(1),
        compiler_params=mosaic.WRITES_ONLY,
    )
    final, *rest = run(
        *(t for t in (x, decay, dtB, C, D, initial_state) if t is not None)
    )
    states = rest.pop(0) if keep_states else None
    return rest.pop() if wants_y else None, states, final


def _body(*refs, s, wants_y, keep_states, ends, through):
    x_g, decay_g, dtb_g, *refs = refs
    c_g, d_g = (refs.pop(0), refs.pop(0)) if wants_y else (None, None)
    start_g, final_g, *refs = refs
    states_g = refs.pop(0) if keep_states else None
    y_g = refs.pop() if wants_y else None
    at, exchange = Place.here(s), Exchange(ends, through)
    skip = (
        tiles.spread(tiles.load(d_g.at[at.channels], tiles.BY_CHANNEL))
        if wants_y
        else None
    )

    def fetch(tile):
        own, head, group = at.tokens(tile), at.head_tokens(tile), at.group_tokens(tile)
        return _Tokens(
            tiles.each(x_g, own, at.channels),
            tiles.each(decay_g, head),
            tiles.each(dtb_g, head),
            tiles.each(c_g, group) if wants_y else None,
        )

    def one(tile, carry):
        state, now = carry
        ahead = fetch(lax.min(tile + 1, s.tiles - 1))
        if keep_states:
            states_g[at.b * s.tiles + tile, at.channels] = state
        slot = lax.rem(tile, 2)
        exchange.put(slot, tiles.product(now.decay), tiles.walk(now, None)[-1])
        entering, state = exchange.get(slot, 0, state)
        if wants_y:
            for j, inside in enumerate(tiles.walk(now, entering)):
                y = tiles.spread(now.C[j]) * inside + skip * tiles.wide(now.x[j])
                y_g[at.tokens(tile), j, at.channels] = y.astype(y_g.dtype)
        return state, ahead

    state = tiles.load(start_g.at[at.b, at.channels], tiles.BY_CHANNEL)
    state, _ = lax.fori_loop(0, s.tiles, one, (state, fetch(0)))
    final_g[at.b, at.channels] = state
