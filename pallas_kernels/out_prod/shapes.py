"""Tile sizes, and named sizes for tests, benchmarks and compile checks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.cases import KernelCase, in_both_forms
from pallas_kernels.tile_sizes import Tiles

PLANES = 4


# Each of the four warps owns 16 x 16 numbers of the result, and one pair of tiles is
# loaded, waited for and used at a time: the textbook form, to read and to compare with.
PLAIN = Tiles(32, 32, 16, 1)


class ProductShape(NamedTuple):
    """The activation gradient of one layer: M tokens, K outputs, N inputs, rank R."""

    m: int
    k: int
    n: int
    rank: int


SHAPES = {
    "student_1b4_in_proj": ProductShape(4096, 8512, 2048, 16),
    "student_1b4_out_proj": ProductShape(4096, 2048, 4096, 16),
    "bitmamba2_1b_in_proj": ProductShape(4096, 8288, 2048, 16),
    "square": ProductShape(4096, 4096, 4096, 16),
}


def choose_tiles(m: int, k: int, n: int) -> Tiles:
    """Tiles for an (M, K) by (K, N) product, K and N at least 16; M may be smaller.

    Three stages of 128 x 64 x 32 take 36 KB in bfloat16: two blocks fit on an SM of any
    of the GPUs.
    """
    tile_m = 128 if m >= 128 else 64
    tile_n = next(t for t in (64, 32, 16) if n >= t)
    tile_k = 32 if k >= 32 else 16
    return Tiles(tile_m, tile_n, tile_k, 3)


def kernel_cases() -> list[KernelCase]:
    """Every kernel at a model's size, for scripts/gpu_compile_check.py."""
    return in_both_forms(_kernel_cases)


def _kernel_cases() -> list[KernelCase]:
    from pallas_kernels.out_prod import launch
    from pallas_kernels.out_prod.kernels import out_prod_kernel
    from pallas_kernels.out_prod.kernels_hopper import out_prod_wgmma

    portable = backend.products() == "mma"

    def case(name, a, b, *, flags="", tiles=None, tail=0, scale=False):
        transpose_a, transpose_b = "a" in flags, "b" in flags
        m, n = a.shape[transpose_a], b.shape[not transpose_b]
        width = [array(m, tail), array(n, tail)] if tail else []
        scales = [array(1, dtype=jnp.float32)] if scale else []
        if portable:
            tiles = tiles or choose_tiles(m, a.shape[not transpose_a], n)
        kernel = out_prod_kernel if portable else out_prod_wgmma

        def function(a, b, *rest):
            return kernel(
                a,
                b,
                rest[0] if scale else None,
                rest[-2:] if tail else None,
                transpose_a=transpose_a,
                transpose_b=transpose_b,
                tiles=tiles,
            )

        return KernelCase(name, function, (a, b, *scales, *width))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def odd(name, a, b, *, rank=0, **flags):
        m, n = a.shape[flags["transpose_a"]], b.shape[not flags["transpose_b"]]

        def function(a, b, *tail):
            return launch.run(a, b, jnp.float32(0.5), tail or None, **flags)

        tail = (array(m, rank), array(n, rank)) if rank else ()
        return KernelCase(name, function, (a, b, *tail))

    m, k, n, rank = SHAPES["student_1b4_in_proj"]
    dy, weight = array(m, k), array(n, k)
    codes, planes = array(n, k, dtype=jnp.int8), array(n, 2176, dtype=jnp.uint8)
    cases = [
        case("nn", array(m, n), weight),
        case("nt", dy, weight, flags="b"),
        case("tn", array(m, n), dy, flags="a"),
        case("tt", array(n, m), array(k, n), flags="ab"),
        case("nt_lora", dy, weight, flags="b", tail=rank),
        case("nt_int8_lora", dy, codes, flags="b", tail=rank, scale=True),
        case("nt_2bit_lora", dy, planes, flags="b", tail=rank, scale=True),
    ]
    # Sizes that are multiples of next to nothing: `launch` finds a way.
    native, turned = ({"transpose_a": False, "transpose_b": t} for t in (False, True))
    cases += [
        odd("odd_nn_lora", array(70, 104), array(104, 72), rank=4, **native),
        odd(
            "odd_tn", array(90, 72), array(90, 40), transpose_a=True, transpose_b=False
        ),
        odd("odd_nt_int8", array(70, 96), array(40, 96, dtype=jnp.int8), **turned),
    ]
    if portable:
        return [*cases, case("nt_plain", dy, weight, flags="b", tiles=PLAIN)]
    return [
        *cases,
        case("square", array(4096, 4096), array(4096, 4096)),
        case("few_rows", array(128, k), weight, flags="b"),
    ]
