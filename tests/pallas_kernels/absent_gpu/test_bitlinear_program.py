"""How a ternary layer's forward pass is compiled for a GPU, by what it writes."""

import re

import jax
import jax.numpy as jnp
import pytest

from bitmamba.config import BitLinearConfig
from bitmamba.models.bitlinear import bit_linear, frozen_bit_linear
from bitmamba.quant.ternary import TernaryWeight
from pallas_kernels.absent_gpu import compile_for
from pallas_kernels.bitlinear.shapes import SHAPES

TOKENS, D, F = SHAPES["student_1b4_in_proj"]
BF16, CFG = jnp.dtype("bfloat16"), BitLinearConfig()
WIDE = f"f32[{TOKENS},{F}]"


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def frozen(kernels, codes):
    def run(x, codes, scale):
        return frozen_bit_linear(x, TernaryWeight(codes, scale), CFG, BF16, kernels)

    return run, (array(TOKENS, D), array(D, F, dtype=codes), array())


def trained(kernels):
    def run(x, w):
        return bit_linear(x, w, CFG, BF16, kernels)

    return run, (array(TOKENS, D), array(D, F))


def written(compiled):
    """Shapes that the entry computation's operations write."""
    text = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    lines = re.findall(r"= (.*?) (?:fusion|custom-call|convert|transpose)\(", entry)
    return [shape for line in lines for shape in re.findall(r"\w+\[[\d,]*\]", line)]


@pytest.mark.parametrize("layer", ["frozen", "trained"])
def test_int8_codes_are_multiplied_as_int8(rtx3060, layer):
    run, arguments = trained("auto") if layer == "trained" else frozen("auto", jnp.int8)

    text = compile_for(rtx3060, run, *arguments).as_text()

    products = re.findall(rf"= (\w+)\[{TOKENS},{F}\]\S* dot\(", text)
    assert products == ["s32"]


@pytest.mark.parametrize("layer", ["frozen", "trained"])
def test_only_the_kernel_scales_before_it_writes(rtx3060, layer):
    def shapes(kernels):
        run, arguments = (
            trained(kernels) if layer == "trained" else frozen(kernels, jnp.int8)
        )
        return written(compile_for(rtx3060, run, *arguments))

    # XLA writes the product in float32 and reads it again: the scales of rows are
    # computed in the same program, which its fusion of products does not take.
    assert WIDE in shapes("auto")
    assert WIDE not in shapes("pallas")
