"""What the kernel can take, and how arguments are brought into that form."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import alignment, backend
from pallas_kernels.bitlinear.shapes import choose_tiles
from pallas_kernels.sharding import over_batch

DTYPES = (jnp.bfloat16, jnp.float16)


def refusal(x_codes: Any, w_codes: Any, dtype: Any) -> str | None:
    """Why the kernel cannot take these operands, in the caller's words, or None."""
    if jnp.dtype(dtype) not in DTYPES:
        return f"dtype: got {jnp.dtype(dtype)}; the kernel gives bfloat16 and float16"
    (n, k) = w_codes.shape
    if n % 8 or n < 16:
        return f"F: got {n}; the kernel takes multiples of 8 from 16 on"
    if k % 32:
        return f"D: got {k}; the kernel takes multiples of 32"
    return None


def run(x_codes, w_codes, scale, dtype) -> jax.Array:
    """The kernel on operands that `refusal` has let through."""
    kernel = functools.partial(_run_here, dtype=dtype)
    arrays = (x_codes, w_codes, scale.reshape(-1))
    return over_batch(kernel, arrays, axes=(0, None, 0), out_axes=0)


def _run_here(x_codes, w_codes, scale, *, dtype):
    if backend.products() == "wgmma":
        from pallas_kernels.bitlinear.kernels_hopper import bit_product_wgmma

        return bit_product_wgmma(x_codes, w_codes, scale, dtype=dtype)
    from pallas_kernels.bitlinear.kernels import bit_product_kernel

    m = x_codes.shape[0]
    tiles = choose_tiles(m, *w_codes.shape[::-1])
    rows = max(m, tiles.m)
    if alignment.copies_by_tma():
        rows = alignment.rounded(rows, alignment.ROWS)
    if rows > m:
        x_codes = jnp.pad(x_codes, ((0, rows - m), (0, 0)))
        scale = jnp.pad(scale, (0, rows - m))
    y = bit_product_kernel(x_codes, w_codes, scale, dtype=dtype, tiles=tiles)
    return y[:m]
