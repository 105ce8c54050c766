"""Tile sizes, and named sizes for tests, benchmarks and compile checks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.cases import KernelCase, in_both_forms
from pallas_kernels.tile_sizes import Tiles


class BitShape(NamedTuple):
    """One layer's forward product: T tokens, D inputs, F outputs."""

    tokens: int
    d_in: int
    d_out: int


SHAPES = {
    "student_1b4_in_proj": BitShape(4096, 2048, 8512),
    "student_1b4_out_proj": BitShape(4096, 4096, 2048),
    "bitmamba2_1b_in_proj": BitShape(4096, 2048, 8288),
}


def choose_tiles(m: int, k: int, n: int) -> Tiles:
    """Tiles for (M, K) by (K, N) codes, K a multiple of 32; M may be smaller.

    Twice the depth of bfloat16 tiles is as many bytes: 36 KB for three stages.
    """
    tile_n = next(t for t in (64, 32, 16) if n >= t)
    return Tiles(128 if m >= 128 else 64, tile_n, 32 if k % 64 else 64, 3)


def kernel_cases() -> list[KernelCase]:
    """The kernel at a model's sizes, for scripts/gpu_compile_check.py."""
    return in_both_forms(_kernel_cases)


def _kernel_cases() -> list[KernelCase]:
    from pallas_kernels.bitlinear import launch
    from pallas_kernels.bitlinear.kernels import bit_product_kernel
    from pallas_kernels.bitlinear.kernels_hopper import bit_product_wgmma

    def case(name):
        tokens, d_in, d_out = SHAPES[name]
        codes = [
            jax.ShapeDtypeStruct((rows, d_in), jnp.int8) for rows in (tokens, d_out)
        ]
        scale = jax.ShapeDtypeStruct((tokens,), jnp.float32)
        kernel = bit_product_wgmma
        if backend.products() == "mma":
            tiles = choose_tiles(tokens, d_in, d_out)
            kernel = functools.partial(bit_product_kernel, tiles=tiles)
        kernel = functools.partial(kernel, dtype=jnp.bfloat16)
        return KernelCase(name, kernel, (*codes, scale))

    odd = KernelCase(
        "odd",
        functools.partial(launch.run, dtype=jnp.bfloat16),
        (
            jax.ShapeDtypeStruct((70, 96), jnp.int8),
            jax.ShapeDtypeStruct((72, 96), jnp.int8),
            jax.ShapeDtypeStruct((70, 1), jnp.float32),
        ),
    )
    return [case("student_1b4_in_proj"), case("student_1b4_out_proj"), odd]
