"""int8 by int8 on tensor cores, the row scales applied before the result is written."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import matmul
from pallas_kernels.matmul import Side
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.tile_sizes import Tiles


def bit_product_kernel(
    x_codes: jax.Array,
    w_codes: jax.Array,
    scale: jax.Array,
    *,
    dtype: Any,
    tiles: Tiles,
) -> jax.Array:
    """(x_codes @ w_codesᵀ) · scale, (T, F) of dtype.

    Args:
        x_codes: (T, D) int8.
        w_codes: (F, D) int8.
        scale: (T,) float32.
        dtype: of the result.
        tiles: sizes of a block's tile; D is a multiple of tiles.k, T and F at least
            tiles.m and tiles.n.
    """
    (m, k), n = x_codes.shape, w_codes.shape[0]
    left, right = Side(jnp.int8, 1, tiles.m), Side(jnp.int8, 1, tiles.n)
    per_row = matmul.layout(plgpu.Layout.MMA_ACC, jnp.int8, tiles).reduce(1)

    def body(x_ref, w_ref, scale_ref, out):
        place = matmul.place_of(m, n, tiles)
        x_rows = matmul.rows(x_ref, place.row, left)
        w_rows = matmul.rows(w_ref, place.column, right)
        acc = matmul.zeros(jnp.int8, tiles)
        acc = matmul.accumulate(acc, x_rows, w_rows, left, right, k, tiles)
        part = scale_ref.at[pl.ds(place.row, tiles.m)]
        row_scale = plgpu.load(part, layout=per_row, optimized=False)
        both = lax.broadcast_in_dim(row_scale, (tiles.m, tiles.n), (0,))
        matmul.store(out, acc.astype(jnp.float32) * both, place, tiles)

    operands = (x_codes, w_codes, scale)
    return matmul.call(body, operands, m, n, tiles, dtype=dtype, name="bit_product")
