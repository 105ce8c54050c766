"""Kernels on two devices: no operand is gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import causal_conv1d, out_prod
from pallas_kernels.absent_gpu import compile_for
from pallas_kernels.sharding import BATCH_AXIS

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(scope="module")
def mesh(two_rtx3060):
    return Mesh(np.array(two_rtx3060.devices), (BATCH_AXIS,))


@pytest.fixture(scope="module")
def arrays(mesh):
    """array(*shape): spread over the devices by its first axis, or on each."""

    def make(*shape, dtype=BF16, spread=False):
        sharding = NamedSharding(mesh, P(BATCH_AXIS) if spread else P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return make


def collectives(compiled):
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    text = compiled.as_text()
    found = {n: len(re.findall(rf" {n}(?:-start)?\(", text)) for n in names}
    return {name: count for name, count in found.items() if count}


def conv(x, weight, bias, ids, dy):
    def run(x, weight, bias):
        return causal_conv1d(
            x,
            weight,
            bias,
            segment_ids=ids,
            activation="silu",
            implementation="pallas",
        ).y

    y, pull = jax.vjp(run, x, weight, bias)
    return y, *pull(dy)


def product(x, w, u, v, dy):
    def run(x, w, u, v):
        return out_prod(x, w, transpose_b=True, tail=(u, v), implementation="pallas")

    y, pull = jax.vjp(run, x, w, u, v)
    return y, *pull(dy)


def conv_arguments(array):
    x = array(4, 256, 256, spread=True)
    weights = array(4, 256, dtype=F32), array(256, dtype=F32)
    return x, *weights, array(4, 256, dtype=jnp.int32, spread=True), x


def product_arguments(array):
    x, dy = array(1024, 512, spread=True), array(1024, 256, spread=True)
    return x, array(256, 512), array(1024, 16, spread=True), array(256, 16), dy


CASES = {"conv": (conv, conv_arguments), "product": (product, product_arguments)}


@pytest.mark.parametrize("case", CASES)
def test_only_gradients_of_what_all_share_are_added_up(case, two_rtx3060, mesh, arrays):
    function, arguments = CASES[case]

    compiled = compile_for(two_rtx3060, function, *arguments(arrays), mesh=mesh)

    assert "mosaic_gpu" in compiled.as_text()
    assert set(collectives(compiled)) == {"all-reduce"}


@pytest.mark.parametrize("case", CASES)
def test_without_a_mesh_the_search_finds_gathered_operands(
    case, two_rtx3060, mesh, arrays
):
    function, arguments = CASES[case]

    compiled = compile_for(two_rtx3060, function, *arguments(arrays))

    assert collectives(compiled)["all-gather"]
