"""The product by wgmma: nn, nt, tn, tt; float, int8 or 2-bit right operands."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import alignment, backend, matmul_hopper
from pallas_kernels.matmul_hopper import Operand, Product
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
            of any size; what TMA does not take (`alignment`) is padded.
        tiles: of `wgmma_tiles`; None: by the size and the device.

    Returns:
        (M, N) in a.dtype.
    """
    k, m = a.shape if transpose_a else a.shape[::-1]
    n = b.shape[0 if transpose_b else 1]
    # Codes are decoded in registers, where wgmma takes its left operand alone: then
    # the result is computed as its transpose.
    codes, planes = b.dtype != a.dtype, b.dtype == jnp.uint8
    rows, columns = (n, m) if codes else (m, n)
    if tiles is None:
        blocks = backend.multiprocessors()
        tiles = wgmma_tiles(rows, columns, blocks=blocks, itemsize=a.dtype.itemsize)
    width, (u, v) = _width([a] if codes else [a, b]), tail or (None, None)
    of_a = Operand(a.dtype, 0 if transpose_a else 1, tiles.m, width)
    of_b = Operand(b.dtype, 1 if transpose_b else 0, tiles.n, width)
    if codes:
        of_a = of_a._replace(tile=tiles.n)
        of_b = Operand(jnp.dtype(jnp.int8), 1, tiles.m, min(_width([b]), tiles.k))
    product = Product(
        m=rows,
        n=columns,
        k=k,
        rank=0 if tail is None else u.shape[1],
        left=of_b if codes else of_a,
        right=of_a if codes else of_b,
        tiles=tiles,
        dtype=a.dtype,
        out_transposed=codes,
        per_plane=b.shape[1] // tiles.k if planes else None,
    )
    if planes:
        b = lax.bitcast_convert_type(b, jnp.int8)
    pairs = (_whole(a, of_a), _whole(b, of_b))
    if tail is not None:
        tail = _stored(u, transpose_a, of_a), _stored(v, not transpose_b, of_a)
    if codes:
        pairs, tail = pairs[::-1], tail and tail[::-1]
    name = "out_prod_wgmma"
    return matmul_hopper.call(*pairs, scale, tail, product=product, name=name)[:m, :n]


def _width(arrays: list[jax.Array]) -> int:
    """Columns of the pieces that all are cut into; if there are none all are padded."""
    itemsize = arrays[0].dtype.itemsize
    found = alignment.columns_at_once((t.shape[1] for t in arrays), itemsize)
    return found or 128 // itemsize


def _whole(t: jax.Array, operand: Operand) -> jax.Array:
    """In whole pieces: a copy where it is not, of sizes that models do not have."""
    rows = alignment.rounded(t.shape[0], alignment.ROWS)
    return alignment.padded(t, rows, alignment.rounded(t.shape[1], operand.width))


def _stored(side: jax.Array, transposed: bool, operand: Operand) -> jax.Array:
    """A side of the tail, (·, R), as the operand that it is added to is stored."""
    side = alignment.padded(side, side.shape[0], alignment.rounded(side.shape[1], 64))
    return _whole(side.T if transposed else side, operand)
