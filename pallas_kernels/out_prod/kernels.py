"""One tensor-core kernel for nn, nt, tn, tt; float, int8 or 2-bit right operands."""

import jax

from pallas_kernels import matmul
from pallas_kernels.matmul import Side
from pallas_kernels.tile_sizes import Tiles


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
    left = Side(a.dtype, 0 if transpose_a else 1, tiles.m)
    right = Side(b.dtype, 1 if transpose_b else 0, tiles.n)
    operands = [a, b, *(() if scale is None else (scale,)), *(tail or ())]

    def body(*refs):
        a_ref, b_ref, *rest, out = refs
        place = matmul.place_of(m, n, tiles)
        a_rows = matmul.rows(a_ref, place.row, left)
        b_rows = matmul.rows(b_ref, place.column, right)
        acc = matmul.zeros(a.dtype, tiles)
        acc = matmul.accumulate(acc, a_rows, b_rows, left, right, k, tiles)
        if scale is not None:
            acc = acc * rest.pop(0)[0]
        if tail is not None:
            acc = _add_tail(acc, *rest, place)
        matmul.store(out, acc, place, tiles)

    def _add_tail(acc, u_ref, v_ref, place):
        u_side, v_side = (Side(a.dtype, 1, side.tile) for side in (left, right))
        u_rows = matmul.rows(u_ref, place.row, u_side)
        v_rows = matmul.rows(v_ref, place.column, v_side)
        width = u_ref.shape[1]
        short = tiles._replace(k=32 if width % 32 == 0 else 16)
        return matmul.accumulate(acc, u_rows, v_rows, u_side, v_side, width, short)

    return matmul.call(body, operands, m, n, tiles, dtype=a.dtype, name="out_prod")
