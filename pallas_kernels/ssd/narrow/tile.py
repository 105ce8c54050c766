"""One tile of tokens inside a kernel: where it lies, how it is walked along.

A block of four warps walks along a row of the batch with 128 channels of one head, a
tile at a time. Of a tile each warp takes a stretch of consecutive tokens and each lane
four channels, so that four stretches advance at once: an array here is (4, 128), one
token of each stretch by the channels. Every warp first walks from a zero state; what
the stretches leave behind is exchanged through shared memory; then it walks again,
from the state that really enters its stretch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu

ds = mosaic.pl.ds

WARPS = 4
CHANNELS = 128
TILED = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, CHANNELS), (4,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)
# Of one number for each stretch, and of one for each channel.
BY_STRETCH, BY_CHANNEL = TILED.reduce(1), TILED.reduce(0)


class Sizes(NamedTuple):
    """B, L, H, P (a multiple of 128), G; tokens of a stretch, pieces of a row.

    L is a multiple of a tile, and so is each piece.
    """

    b: int
    length: int
    h: int
    p: int
    g: int
    stretch: int
    pieces: int = 1

    @property
    def tiles(self) -> int:
        """Of a row."""
        return self.length // (WARPS * self.stretch)

    @property
    def channels(self) -> int:
        return self.h * self.p

    @property
    def blocks(self) -> int:
        """Blocks of channels in a row."""
        return self.channels // CHANNELS


class Place(NamedTuple):
    """Where one thread block's data lie: row of the batch, piece, block of channels."""

    s: Sizes
    b: Any
    piece: Any
    block: Any

    @classmethod
    def here(cls, sizes: Sizes) -> "Place":
        """From the grid, see `call`."""
        return cls(sizes, *(lax.axis_index(name) for name in _GRID[::-1]))

    @property
    def channels(self) -> Any:
        return ds(self.block * CHANNELS, CHANNELS)

    def tokens(self, tile: Any) -> Any:
        """Stretches of x, (B·L/n, n, H·P)."""
        return self._stretches(self.b, tile)

    def block_tokens(self, tile: Any) -> Any:
        """Stretches of what there is one of for each block of channels."""
        return self._stretches(self.b * self.s.blocks + self.block, tile)

    def head_tokens(self, tile: Any) -> Any:
        """Stretches of what there is one of for each head."""
        head = lax.div(self.block * CHANNELS, self.s.p)
        return self._stretches(self.b * self.s.h + head, tile)

    def group_tokens(self, tile: Any) -> Any:
        """Stretches of what there is one of for each group."""
        group = lax.div(self.block * CHANNELS, self.s.p * (self.s.h // self.s.g))
        return self._stretches(self.b * self.s.g + group, tile)

    def tile(self, tile: Any) -> Any:
        """Row of what there is one of for each tile, (B·tiles, H·P)."""
        return self.b * self.s.tiles + tile

    @property
    def end(self) -> Any:
        """Row of what there is one of for each piece, (B·pieces, H·P)."""
        return self.b * self.s.pieces + self.piece

    def _stretches(self, series, tile):
        return ds((series * self.s.tiles + tile) * WARPS, WARPS)


_GRID = ("block", "piece", "b")


def call(body: Callable, out_type: Any, sizes: Sizes, kinds: int) -> Callable:
    """The kernel of a body that exchanges so many kinds of ends."""
    return mosaic.kernel(
        body,
        out_type=out_type,
        grid=(sizes.blocks, sizes.pieces, sizes.b),
        grid_names=_GRID,
        scratch_types=Exchange.scratch(kinds),
        # `Exchange` has the barrier that is needed.
        compiler_params=mosaic.WRITES_ONLY,
    )


def along(
    at: Place, fetch: Callable, step: Callable, carry: Any, *, reverse: bool = False
) -> Any:
    """step(tile, slot, fetch(tile), carry) -> carry, over the tiles of the piece.

    Each tile is fetched while the one before is worked on: loads are awaited where
    their values are first used, a tile later. slot: of `Exchange`.
    """
    tiles = at.s.tiles // at.s.pieces

    def place(i):
        i = lax.min(i, tiles - 1)
        return at.piece * tiles + (tiles - 1 - i if reverse else i)

    def one(i, both):
        carry, now = both
        ahead = fetch(place(i + 1))
        return step(place(i), lax.rem(i, 2), now, carry), ahead

    first = fetch(place(jnp.int32(0)))
    return lax.fori_loop(0, tiles, one, (carry, first))[0]


def load(ref: Any, layout: Any = TILED) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def each(ref: Any, stretches: Any, *channels: Any) -> tuple[jax.Array, ...]:
    """The tokens of a tile in order: (4, 128) each, or (4,) without channels."""
    layout = TILED if channels else BY_STRETCH
    tokens = range(ref.shape[1])
    return tuple(load(ref.at[(stretches, j, *channels)], layout) for j in tokens)


def zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((WARPS, CHANNELS), jnp.float32), TILED)


def wide(value: jax.Array) -> jax.Array:
    return value.astype(jnp.float32)


def spread(values: jax.Array) -> jax.Array:
    """(4,) by stretch, or (128,) by channel, -> (4, 128)."""
    axis = 0 if values.shape == (WARPS,) else 1
    whole = lax.broadcast_in_dim(values, (WARPS, CHANNELS), (axis,))
    return plgpu.layout_cast(whole, TILED)


def passed(decay: jax.Array, value: jax.Array) -> jax.Array:
    """decay · value; zero where the decay is, also if the value has overflowed."""
    return jnp.where(decay != 0, decay * value, 0.0)


def product(values: Sequence[jax.Array]) -> jax.Array:
    total = values[0]
    for value in values[1:]:
        total = total * value
    return total


def walk(tokens: Any, state: jax.Array | None) -> list[jax.Array]:
    """The states after each token of a stretch, None for zeros to begin with.

    tokens: x, decay and dtB, each in order.
    """
    states = []
    for x, decay, dtB in zip(tokens.x, tokens.decay, tokens.dtB, strict=True):
        added = spread(dtB) * wide(x)
        state = added if state is None else passed(spread(decay), state) + added
        states.append(state)
    return states


def sent_back(tokens: Any, dstate: jax.Array | None) -> jax.Array:
    """The gradient of the state before a stretch from that of the one after it.

    tokens: dy, decay and C, each in order. dstate: None for zeros.
    """
    for j in range(len(tokens.dy))[::-1]:
        own = spread(tokens.C[j]) * wide(tokens.dy[j])
        dstate = own if dstate is None else dstate + own
        dstate = passed(spread(tokens.decay[j]), dstate)
    return dstate


class Exchange(NamedTuple):
    """Shared memory through which stretches learn what those before them leave.

    ends: (2 slots, kinds, 4, 128) float32. through: (2 slots, 4) float32.
    """

    ends: Any
    through: Any

    @staticmethod
    def scratch(kinds: int) -> dict[str, Any]:
        return {
            "ends": plgpu.SMEM((2, kinds, WARPS, CHANNELS), jnp.float32),
            "through": plgpu.SMEM((2, WARPS), jnp.float32),
        }

    def put(self, slot: Any, through: jax.Array, *ends: jax.Array) -> None:
        """Each stretch's decay, and what it leaves of each kind; to be read by `get`.

        Slots take turns, so that one barrier a tile is enough: a slot is written again
        behind the barrier of the tile between, which no warp passes before all have
        read.
        """
        self.through.at[slot][...] = through
        for kind, end in enumerate(ends):
            self.ends.at[slot, kind][...] = end
        mosaic.meet()

    def get(
        self, slot: Any, kind: int, carried: jax.Array, *, reverse: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(what enters each stretch (4, 128), what leaves the last of them (128,))."""
        order = range(WARPS)[::-1] if reverse else range(WARPS)
        entering = []
        for w in order:
            entering.append(carried)
            end = load(self.ends.at[slot, kind, w], BY_CHANNEL)
            carried = passed(self.through[slot, w], carried) + end
        at = plgpu.broadcasted_iota(jnp.int32, (WARPS, CHANNELS), 0, layout=TILED)
        chosen = spread(entering[0])
        for w, value in list(zip(order, entering, strict=True))[1:]:
            chosen = jnp.where(at == w, spread(value), chosen)
        return chosen, carried
