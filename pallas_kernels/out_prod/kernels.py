"""One tensor-core kernel for nn, nt, tn and tt, float, int8 and 2-bit right operands.

A block of four warps computes one tile of the result. Tiles of both operands come
through a pipeline (cp.async before Hopper, TMA since); a transposed operand is read
through a transposed view of its tile, so nothing is transposed in memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.out_prod.shapes import Tiles


class _Side(NamedTuple):
    """One operand: the axis that the sum runs over, and the other's tile."""

    dtype: Any
    sum_axis: int
    tile: int


def out_prod_kernel(
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array | None,
    tail: tuple[jax.Array, jax.Array] | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    tiles: Tiles,
) -> jax.Array:
    """op(a) @ op(b) · scale + u @ vᵀ for tail = (u, v), float32 sums.

    Args:
        a: (M, K), transposed (K, M); float16 or bfloat16.
        b: (K, N), transposed (N, K), like a; or int8 codes (N, K); or uint8 (N, C),
            2-bit codes in planes (`planes.py`). Codes come transposed only.
        scale: (1,) float32 or None.
        tail: u (M, R) and v (N, R) like a, R a multiple of 16; or None.
        transpose_a, transpose_b: how a and b are stored.
        tiles: sizes of a block's tile; K is a multiple of tiles.k, M and N at least
            tiles.m and tiles.n.

    Returns:
        (M, N) in a.dtype.
    """
    k, m = a.shape if transpose_a else a.shape[::-1]
    n = b.shape[0] if transpose_b else b.shape[1]
    left = _Side(a.dtype, 0 if transpose_a else 1, tiles.m)
    right = _Side(b.dtype, 1 if transpose_b else 0, tiles.n)
    blocks = (pl.cdiv(m, tiles.m), pl.cdiv(n, tiles.n))
    operands = [a, b, *(() if scale is None else (scale,)), *(tail or ())]

    def body(*refs):
        *inputs, out = refs
        a_ref, b_ref, *rest = inputs
        to_row = lax.axis_index("row") * tiles.m
        to_column = lax.axis_index("column") * tiles.n
        # Where M or N is not a multiple, the last block starts earlier and computes
        # some of its neighbour's results once more; `_trim` drops them.
        row = jnp.minimum(to_row, m - tiles.m)
        column = jnp.minimum(to_column, n - tiles.n)
        a_rows = _rows(a_ref, row, left)
        b_rows = _rows(b_ref, column, right)
        zeros = jnp.zeros((tiles.m, tiles.n), jnp.float32)
        acc = plgpu.layout_cast(zeros, _layout(plgpu.Layout.MMA_ACC, a.dtype, tiles))
        acc = _accumulate(acc, a_rows, b_rows, left, right, k, tiles)
        if scale is not None:
            acc = acc * rest.pop(0)[0]
        if tail is not None:
            u_ref, v_ref = rest
            u_side, v_side = (_Side(a.dtype, 1, s.tile) for s in (left, right))
            u_rows, v_rows = _rows(u_ref, row, u_side), _rows(v_ref, column, v_side)
            width = tail[0].shape[1]
            short = tiles._replace(k=32 if width % 32 == 0 else 16)
            acc = _accumulate(acc, u_rows, v_rows, u_side, v_side, width, short)

        def store(staged):
            staged[...] = acc.astype(a.dtype)
            place = pl.ds(to_row, tiles.m), pl.ds(to_column, tiles.n)
            mosaic.store_tile(out.at[place], staged)

        # Allocated here, it takes the place of the pipeline's tiles.
        pl.run_scoped(store, mosaic.smem((tiles.m, tiles.n), a.dtype))

    body.__name__ = "out_prod"
    shape = (blocks[0] * tiles.m, blocks[1] * tiles.n)
    product = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, a.dtype),
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


def _rows(ref, start, side):
    """The part of an operand that one block reads."""
    part = pl.ds(start, side.tile)
    return ref.at[part] if side.sum_axis == 1 else ref.at[:, part]


def _accumulate(acc, a_rows, b_rows, left, right, k, tiles):
    """acc + a_rows @ b_rows, tile by tile along the sum."""
    steps = k // tiles.k
    is_planes = right.dtype == jnp.uint8
    per_plane = b_rows.shape[1] // tiles.k if is_planes else steps

    a_layout = _layout(plgpu.Layout.MMA_LHS, left.dtype, tiles)
    b_layout = _layout(plgpu.Layout.MMA_RHS, left.dtype, tiles)

    def step(index, a_tile, b_tile, acc):
        plane = lax.div(index[0], per_plane) if is_planes else None
        a_part = _load(a_tile, left, a_layout, wanted=1)
        b_part = _load(b_tile, right, b_layout, wanted=0)
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


def _layout(kind, dtype, tiles):
    """Of `mma`, four warps: as many of them below each other as there are rows for."""
    return kind(dtype, m_warps=min(4, tiles.m // 16))


def _spec(side, tile_k, place):
    shape, dtype = (side.tile, tile_k), side.dtype
    if side.sum_axis == 1:
        return mosaic.tile_spec(shape, dtype, lambda s: (0, place(s)))
    return mosaic.tile_spec(shape[::-1], dtype, lambda s: (place(s), 0))


def _load(tile, side, layout, *, wanted):
    """A tile in registers, its sum along axis `wanted`."""
    view = tile if side.sum_axis == wanted else mosaic.transposed(tile)
    is_codes = jnp.issubdtype(side.dtype, jnp.integer)
    # Codes lie in registers as the numbers they become do: no fast load fits that.
    return plgpu.load(view, layout=layout, optimized=not is_codes)


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
