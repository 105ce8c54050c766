"""The compiled backward pass of a LoRA layer, at the size of a 1.4 B model's in_proj.

Nothing as large as the frozen weight may be computed: no transpose, copy or upcast.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from bitmamba.config import BitLinearConfig
from bitmamba.models import adapters, layers, lora_linear
from bitmamba.models.adapters import Adapter
from bitmamba.quant.ternary import TernaryWeight
from bitmamba.types import AdapterSpec
from pallas_kernels import pack_planes
from pallas_kernels.absent_gpu import compile_for
from pallas_kernels.out_prod.shapes import SHAPES

TOKENS, F, D, RANK = SHAPES["student_1b4_in_proj"]
BF16, F32 = jnp.bfloat16, jnp.float32


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def backward(kernels, bit):
    """Gradients of one adapted layer to its input and its adapter."""
    spec = AdapterSpec("p", "p", (D, F), 0, RANK, 2.0)

    def forward(x, kernel, branches):
        y = layers.linear(x, kernel, bit=bit, dtype=BF16)
        return adapters.add_branches(y, x, branches, weight=None, key=None)

    def run(x, kernel, a, b, dy):
        def layer(x, a, b):
            branches = [Adapter(spec=spec, a=a, b=b)]
            if kernels == "pallas":
                return lora_linear.lora_linear(forward, BF16, x, kernel, branches)
            return forward(x, kernel, branches)

        return jax.vjp(layer, x, a, b)[1](dy)

    return run


def weight_sized(text, size):
    """Results of the entry computation with `size` elements or more, by operation."""
    entry = text[text.index("\nENTRY ") :]
    found = {}
    for line in entry.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if match and math.prod(map(int, match[1].split(","))) >= size:
            found[match[2]] = found.get(match[2], 0) + 1
    return found


@pytest.mark.parametrize("kernels", ["reference", "pallas"])
@pytest.mark.parametrize("stored", ["dense", "bfloat16", "int8"])
def test_nothing_the_size_of_the_weight_is_computed(rtx3060, kernels, stored):
    dtype = jnp.int8 if stored == "int8" else BF16
    kernel = array(D, F, dtype=dtype)
    bit = None
    if stored != "dense":
        kernel, bit = TernaryWeight(kernel, array()), BitLinearConfig()
    # Few tokens: every activation is smaller than the weight.
    x, dy = array(1024, D), array(1024, F, dtype=BF16)
    compiled = compile_for(
        rtx3060, backward(kernels, bit), x, kernel, array(D, RANK), array(RANK, F), dy
    )

    text = compiled.as_text()

    assert weight_sized(text, D * F) == {"parameter": 1}
    assert ("mosaic_gpu" in text) == (kernels == "pallas")


def test_the_search_finds_a_transposed_weight(rtx3060):
    def transposes(w):
        return jax.lax.optimization_barrier(w.T) + 1

    text = compile_for(rtx3060, transposes, array(D, F)).as_text()

    assert set(weight_sized(text, D * F)) - {"parameter"}


def test_two_bit_codes_are_read_as_they_lie(rtx3060):
    from pallas_kernels.out_prod import vjp

    def dx(dy, packed, scale, u, v):
        return vjp.out_prod(dy, packed, scale, (u, v), False, True, True)

    packed = jax.eval_shape(pack_planes, array(D, F, dtype=jnp.int8))
    tail = array(1024, RANK, dtype=BF16), array(D, RANK, dtype=BF16)
    dy = array(1024, F, dtype=BF16)
    compiled = compile_for(rtx3060, dx, dy, packed, array(), *tail)

    # dy and the codes; dx is smaller than a quarter of the weight.
    assert weight_sized(compiled.as_text(), D * F // 4) == {"parameter": 2}
    assert compiled.memory_analysis().temp_size_in_bytes < D * F // 4
