"""Named sizes of the scan, for tests, benchmarks and compile checks."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.cases import KernelCase, in_both_forms


class SSDShape(NamedTuple):
    """Sizes of one scan: B, L, H, P, G, N and the chunk."""

    batch: int
    length: int
    n_heads: int
    headdim: int
    n_groups: int
    d_state: int
    chunk_size: int


SHAPES = {
    "mamba2_130m": SSDShape(1, 4096, 24, 64, 1, 128, 64),
    "student_1b4": SSDShape(1, 4096, 64, 64, 1, 128, 64),
    "eight_groups": SSDShape(1, 4096, 64, 64, 8, 64, 64),
    # States padded to the 16 columns of the narrowest product.
    "few_states": SSDShape(1, 4096, 64, 64, 1, 8, 64),
    "bitmamba2_255m": SSDShape(1, 4096, 16, 128, 16, 1, 64),
    "bitmamba2_1b": SSDShape(1, 4096, 32, 128, 32, 1, 64),
}


def kernel_cases() -> list[KernelCase]:
    """Every kernel at the models' sizes, for scripts/gpu_compile_check.py.

    One kernel to a case, so that each has its own numbers.
    """
    from pallas_kernels.ssd import kernel_cases

    def cases(name, dtype=jnp.bfloat16, suffix=""):
        return [
            KernelCase(f"{name}{suffix}/{kernel}", function, arguments)
            for kernel, function, arguments in kernel_cases.of_shape(
                SHAPES[name], dtype
            )
        ]

    found = in_both_forms(lambda: cases("student_1b4"))
    if backend.products() == "wgmma":
        # The merged gradient kernel has no register to spare.
        found += cases("mamba2_130m") + cases("eight_groups")
    # No form but the portable one takes these.
    found += cases("few_states") + cases("mamba2_130m", jnp.float32, "_f32")
    found += cases("bitmamba2_1b") + cases("bitmamba2_1b", jnp.float32, "_f32")
    return found
