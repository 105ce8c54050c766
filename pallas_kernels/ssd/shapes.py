"""Named sizes of the scan, for tests, benchmarks and compile checks."""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.cases import KernelCase


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

    named = [
        ("student_1b4", SHAPES["student_1b4"], jnp.bfloat16),
        ("few_states", SHAPES["few_states"], jnp.bfloat16),
        ("bitmamba2_1b", SHAPES["bitmamba2_1b"], jnp.bfloat16),
        ("bitmamba2_1b_f32", SHAPES["bitmamba2_1b"], jnp.float32),
        ("mamba2_130m_f32", SHAPES["mamba2_130m"], jnp.float32),
    ]
    return [
        KernelCase(f"{name}/{kernel}", function, arguments)
        for name, shape, dtype in named
        for kernel, function, arguments in kernel_cases.of_shape(shape, dtype)
    ]
