"""Products of tiles, shared by the kernels: what one block of four warps computes.

Tiles of both operands come through a pipeline (cp.async before Hopper, TMA since); a
transposed operand is read through a transposed view of its tile, so nothing is
transposed in memory. Sums stay in registers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.tile_sizes import Tiles


class Side(NamedTuple):
    """One operand: the axis that the sum runs over, and the other's tile."""

    dtype: Any
    sum_axis: int
    tile: int


class Place(NamedTuple):
    """Where a block of an (M, N) result reads, and where in whole tiles it writes."""

    row: Any
    column: Any
    to_row: Any
    to_column: Any


def place_of(m: int, n: int, tiles: Tiles) -> Place:
    """Of this block, in a grid ("row", "column").

    Where M or N is not a multiple, the last block starts earlier and computes some of
    its neighbour's results once more; `call` drops them.
    """
    to_row = lax.axis_index("row") * tiles.m
    to_column = lax.axis_index("column") * tiles.n
    row = jnp.minimum(to_row, m - tiles.m)
    return Place(row, jnp.minimum(to_column, n - tiles.n), to_row, to_column)


def store(out: Any, result: jax.Array, place: Place, tiles: Tiles) -> None:
    """Write a block's result, in the dtype of `out`, through shared memory.

    Allocated here, that takes the place of the pipeline's tiles.
    """

    def through(staged):
        staged[...] = result.astype(out.dtype)
        where = pl.ds(place.to_row, tiles.m), pl.ds(place.to_column, tiles.n)
        mosaic.store_tile(out.at[where], staged)

    pl.run_scoped(through, mosaic.smem((tiles.m, tiles.n), out.dtype))


def call(
    body: Any, operands: Any, m: int, n: int, tiles: Tiles, *, dtype: Any, name: str
) -> jax.Array:
    """(M, N) of dtype, from a body of (*operands, out) that stores one tile a block."""
    body.__name__ = name
    blocks = (pl.cdiv(m, tiles.m), pl.cdiv(n, tiles.n))
    shape = (blocks[0] * tiles.m, blocks[1] * tiles.n)
    product = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=blocks,
        grid_names=("row", "column"),
        compiler_params=mosaic.LANE,
    )(*operands)
    return _trim(_trim(product, 0, m, tiles.m), 1, n, tiles.n)


def _trim(product, axis, size, tile):
    """Without what the last block computed a second time; a copy where that is any."""
    twice = product.shape[axis] - size
    if not twice:
        return product
    last = product.shape[axis] - tile
    parts = ((0, last), (last + twice, last + tile))
    kept = [lax.slice_in_dim(product, *part, axis=axis) for part in parts]
    return jnp.concatenate(kept, axis=axis)


def rows(ref: Any, start: Any, side: Side) -> Any:
    """The part of an operand that one block reads."""
    part = pl.ds(start, side.tile)
    return ref.at[part] if side.sum_axis == 1 else ref.at[:, part]


def zeros(dtype: Any, tiles: Tiles) -> jax.Array:
    """Sums to begin with, of operands of dtype: int32 for int8, else float32."""
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    return plgpu.layout_cast(
        jnp.zeros((tiles.m, tiles.n), wide), layout(plgpu.Layout.MMA_ACC, dtype, tiles)
    )


def accumulate(
    acc: jax.Array,
    a_rows: Any,
    b_rows: Any,
    left: Side,
    right: Side,
    k: int,
    tiles: Tiles,
) -> jax.Array:
    """acc + a_rows @ b_rows over a sum of length k, tile by tile.

    The right operand may be codes for a float left one, int8 or uint8 of four planes of
    2-bit codes: they become numbers of the left one's dtype in registers.
    """
    steps = k // tiles.k
    is_planes = right.dtype == jnp.uint8
    per_plane = b_rows.shape[1] // tiles.k if is_planes else steps

    a_layout = layout(plgpu.Layout.MMA_LHS, left.dtype, tiles)
    b_layout = layout(plgpu.Layout.MMA_RHS, left.dtype, tiles)

    def step(index, a_tile, b_tile, acc):
        plane = lax.div(index[0], per_plane) if is_planes else None
        a_part = _load(a_tile, left, a_layout, wanted=1, fast=True)
        # Codes lie in registers as the numbers they become do: no fast load does that.
        fast = right.dtype == left.dtype
        b_part = _load(b_tile, right, b_layout, wanted=0, fast=fast)
        mosaic.smem_read()
        return plgpu.mma(acc, a_part, _decode(b_part, plane, left.dtype))

    pipeline = plgpu.emit_pipeline(
        step,
        grid=(steps,),
        in_specs=(
            _spec(left, tiles.k, lambda s: s),
            _spec(right, tiles.k, lambda s: lax.rem(s, per_plane)),
        ),
        max_concurrent_steps=min(tiles.stages, steps),
        init_carry=acc,
    )
    return pipeline(a_rows, b_rows)


def layout(kind: Any, dtype: Any, tiles: Tiles) -> Any:
    """Of `mma`, four warps: as many of them below each other as there are rows for."""
    return kind(dtype, m_warps=min(4, tiles.m // 16))


def _spec(side, tile_k, place):
    shape, dtype = (side.tile, tile_k), side.dtype
    if side.sum_axis == 1:
        return mosaic.tile_spec(shape, dtype, lambda s: (0, place(s)))
    return mosaic.tile_spec(shape[::-1], dtype, lambda s: (place(s), 0))


def _load(tile, side, layout, *, wanted, fast):
    """A tile in registers, its sum along axis `wanted`."""
    view = tile if side.sum_axis == wanted else mosaic.transposed(tile)
    return plgpu.load(view, layout=layout, optimized=fast)


def _decode(codes, plane, dtype):
    """Codes as numbers of `dtype`; numbers as they are.

    Through int32 and float32: what converts int8 to bfloat16 at once needs sm_90.
    """
    if codes.dtype == dtype:
        return codes
    codes = codes.astype(jnp.int32)
    if plane is not None:
        codes = ((codes >> (2 * plane)) & 3) - 1
    return codes.astype(jnp.float32).astype(dtype)
