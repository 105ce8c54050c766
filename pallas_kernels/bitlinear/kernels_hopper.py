"""int8 by int8 with wgmma, the row scales applied before the result is written."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import alignment, backend, matmul_hopper
from pallas_kernels.matmul_hopper import Operand, Product
from pallas_kernels.tile_sizes import Tiles, wgmma_tiles


def bit_product_wgmma(
    x_codes: jax.Array,
    w_codes: jax.Array,
    scale: jax.Array,
    *,
    dtype: Any,
    tiles: Tiles | None = None,
) -> jax.Array:
    """(x_codes @ w_codesᵀ) · scale, (T, F) of dtype.

    Args:
        x_codes: (T, D) int8, D a multiple of 32.
        w_codes: (F, D) int8, F a multiple of 8. wgmma reads 8-bit operands along D
            only, as they lie.
        scale: (T,) float32.
        dtype: of the result.
        tiles: of `wgmma_tiles`; None: by the size and the device.
    """
    (m, k), n = x_codes.shape, w_codes.shape[0]
    if tiles is None:
        tiles = wgmma_tiles(m, n, blocks=backend.multiprocessors(), itemsize=1)
    width = alignment.columns_at_once([k], 1)
    product = Product(
        m=m,
        n=n,
        k=k,
        rank=0,
        left=Operand(jnp.dtype(jnp.int8), 1, tiles.m, width),
        right=Operand(jnp.dtype(jnp.int8), 1, tiles.n, width),
        tiles=tiles,
        dtype=jnp.dtype(dtype),
    )
    x_codes = alignment.padded(x_codes, alignment.rounded(m, alignment.ROWS), k)
    # Scales are read by whole tiles, without TMA: nothing guards the end.
    scale = jnp.pad(scale, (0, product.rows - m))
    name = "bit_product_wgmma"
    y = matmul_hopper.call(x_codes, w_codes, scale, None, product=product, name=name)
    return y[:m, :n]
