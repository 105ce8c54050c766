"""The product by wgmma: nn, nt, tn, tt; float, int8 or 2-bit right operands."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend, matmul_hopper
from pallas_kernels.matmul import Side
from pallas_kernels.matmul_hopper import Product
from pallas_kernels.tile_sizes import Tiles, wgmma_tiles


def out_prod_wgmma(
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array | None,
    tail: tuple[jax.Array, jax.Array] | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    tiles: Tiles | None = None,
) -> jax.Array:
    """op(a) @ op(b) · scale + u @ vᵀ for tail = (u, v), float32 sums.

    Args:
        a, b, scale, tail, transpose_a, transpose_b: as `out_prod_kernel` takes them,
            but K may be any number, and M and N as small as one likes.
        tiles: of `wgmma_tiles`; None: by the size and the device.

    Returns:
        (M, N) in a.dtype.
    """
    k, m = a.shape if transpose_a else a.shape[::-1]
    n = b.shape[0 if transpose_b else 1]
    sums_of_a, sums_of_b = (0 if transpose_a else 1), (1 if transpose_b else 0)
    stored = tail and (
        tail[0].T if transpose_a else tail[0],
        tail[1] if transpose_b else tail[1].T,
    )
    rank = tail[0].shape[1] if tail else 0
    # Codes are decoded in registers, where wgmma takes its left operand alone: then
    # the result is computed as its transpose.
    codes = b.dtype != a.dtype
    rows, columns = (n, m) if codes else (m, n)
    if tiles is None:
        blocks = backend.multiprocessors()
        tiles = wgmma_tiles(rows, columns, blocks=blocks, itemsize=a.dtype.itemsize)
    of_a, of_b = Side(a.dtype, sums_of_a, tiles.n), Side(jnp.int8, 1, tiles.m)
    if not codes:
        of_a = of_a._replace(tile=tiles.m)
        of_b = Side(b.dtype, sums_of_b, tiles.n)
    planes = b.dtype == jnp.uint8
    product = Product(
        m=rows,
        n=columns,
        k=k,
        rank=rank,
        left=of_b if codes else of_a,
        right=of_a if codes else of_b,
        tiles=tiles,
        dtype=a.dtype,
        out_transposed=codes,
        per_plane=b.shape[1] // tiles.k if planes else None,
    )
    if planes:
        b = lax.bitcast_convert_type(b, jnp.int8)
    operands, tail = ((b, a), stored and stored[::-1]) if codes else ((a, b), stored)
    return matmul_hopper.call(
        *operands, scale, tail, product=product, name="out_prod_wgmma"
    )
