"""What the convolution's compiled backward pass keeps in memory, by size."""

import jax
import jax.numpy as jnp

from pallas_kernels import causal_conv1d
from pallas_kernels.absent_gpu import compile_for
from pallas_kernels.causal_conv1d.shapes import SHAPES


def backward(implementation):
    def run(x, weight, bias, ids, dy):
        def conv(x, weight, bias):
            return causal_conv1d(
                x,
                weight,
                bias,
                segment_ids=ids,
                activation="silu",
                implementation=implementation,
            ).y

        return jax.vjp(conv, x, weight, bias)[1](dy)

    return run


def test_the_kernel_keeps_no_float32_gradient(rtx3060):
    batch, length, channels, taps = SHAPES["student_1b4"]
    x = jax.ShapeDtypeStruct((batch, length, channels), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((taps, channels), jnp.float32)
    bias = jax.ShapeDtypeStruct((channels,), jnp.float32)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    temporaries = {}
    for implementation in ("reference", "pallas"):
        compiled = compile_for(
            rtx3060, backward(implementation), x, weight, bias, ids, x
        )
        plan = compiled.memory_analysis()
        temporaries[implementation] = plan.temp_size_in_bytes
        wide = f"f32[{batch},{length},{channels}]" in compiled.as_text()
        assert wide == (implementation == "reference")

    # The window and its gradient in bfloat16, and the sums of each block.
    sums = 4 * (taps + 1) * channels * (length // 64 + 1)
    assert temporaries["pallas"] <= 2 * 2.01 * length * channels + 1.1 * sums
    assert temporaries["reference"] >= 4 * length * channels
