"""Sizes of a block, and named sizes for tests, benchmarks and compile checks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.cases import KernelCase


class Blocks(NamedTuple):
    """Tokens and channels of one block of four warps; channels a multiple of 128."""

    tokens: int
    channels: int


# Three tokens of 67 are read twice. Two channels a thread: 4 bytes of bfloat16 each,
# 512 a row.
DEFAULT = Blocks(64, 256)


class ConvShape(NamedTuple):
    """Sizes of one convolution: B, L, C and K."""

    batch: int
    length: int
    channels: int
    taps: int


SHAPES = {
    "mamba2_130m": ConvShape(1, 4096, 1792, 4),
    "student_1b4": ConvShape(1, 4096, 4352, 4),
    "bitmamba2_1b": ConvShape(1, 4096, 4160, 4),
}


def kernel_cases() -> list[KernelCase]:
    """Both kernels at a model's size, for scripts/gpu_compile_check.py."""
    from pallas_kernels.causal_conv1d import kernels

    batch, length, channels, taps = SHAPES["student_1b4"]

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    places = length + taps - 1
    weights = (array(taps, channels, dtype=jnp.float32), array(channels))
    run = array(batch, places, dtype=jnp.int32)
    dy = array(batch, length, channels)
    options = {"activation": "silu", "blocks": DEFAULT}
    forward = functools.partial(kernels.conv_kernel, **options)
    backward = functools.partial(kernels.conv_gradient_kernel, **options)
    window = array(batch, places, channels)
    wide = array(batch, places, channels, dtype=jnp.float32)
    return [
        KernelCase("forward", forward, (window, *weights, run)),
        KernelCase("forward_f32", forward, (wide, *weights, run)),
        KernelCase("forward_dense", _without_run(forward), (window, *weights)),
        KernelCase("backward", backward, (window, *weights, run, dy)),
        KernelCase("backward_dense", _without_run(backward), (window, *weights, dy)),
    ]


def _without_run(kernel):
    return lambda window, weight, bias, *dy: kernel(window, weight, bias, None, *dy)
