"""The scan by kernels as compiled: on two devices, and what it keeps in memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import ssd
from pallas_kernels.absent_gpu import compile_for
from pallas_kernels.sharding import BATCH_AXIS
from pallas_kernels.ssd.shapes import SHAPES

BF16, F32 = jnp.bfloat16, jnp.float32


def forward_and_backward(x, dt, A, B, C, D, ids):
    def run(x, dt, A, B, C, D):
        rest = {"segment_ids": ids, "chunk_size": 64, "implementation": "pallas"}
        return ssd(x, dt, A, B, C, D=D, **rest).y

    y, pull = jax.vjp(run, x, dt, A, B, C, D)
    return y, *pull(y)


@pytest.mark.parametrize("states", [32, 1])
def test_two_devices_gather_nothing_and_add_up_dA_and_dD(states, two_rtx3060):
    mesh = Mesh(np.array(two_rtx3060.devices), (BATCH_AXIS,))

    def array(*shape, dtype=BF16, spread=True):
        sharding = NamedSharding(mesh, P(BATCH_AXIS) if spread else P())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, maps = array(4, 100, 4, 64), array(4, 100, 2, states)
    dt, A = array(4, 100, 4, dtype=F32), array(4, dtype=F32, spread=False)
    ids = array(4, 100, dtype=jnp.int32)

    arguments = (x, dt, A, maps, maps, A, ids)
    compiled = compile_for(two_rtx3060, forward_and_backward, *arguments, mesh=mesh)

    text = compiled.as_text()
    names = ("all-gather", "all-to-all", "collective-permute")
    assert not [n for n in names if re.search(rf" {n}(?:-start)?\(", text)]
    assert re.search(r" all-reduce(?:-start)?\(", text)


def test_the_backward_keeps_states_in_bfloat16_and_no_wide_copy_of_x(rtx3060):
    length, heads = 2048, 16
    x = jax.ShapeDtypeStruct((1, length, heads, 64), BF16)
    maps = jax.ShapeDtypeStruct((1, length, 1, 128), BF16)
    dt = jax.ShapeDtypeStruct((1, length, heads), F32)
    A = jax.ShapeDtypeStruct((heads,), F32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    arguments = (x, dt, A, maps, maps, A, ids)
    compiled = compile_for(rtx3060, forward_and_backward, *arguments)

    # The states and their gradients, of 64 x 128 a head for 64 tokens: four times x.
    states = 2 * 2 * length * heads * 128
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert states <= temporaries <= 1.5 * states
    assert f"f32[1,{length},{heads},64]" not in compiled.as_text()


def test_one_state_per_channel_is_read_where_it_lies(rtx3060):
    length, heads = 2048, 16
    x = jax.ShapeDtypeStruct((1, length, heads, 128), BF16)
    maps = jax.ShapeDtypeStruct((1, length, heads, 1), BF16)
    dt = jax.ShapeDtypeStruct((1, length, heads), F32)
    A = jax.ShapeDtypeStruct((heads,), F32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    arguments = (x, dt, A, maps, maps, A, ids)
    compiled = compile_for(rtx3060, forward_and_backward, *arguments)

    # Nothing of x's size: a state for 32 tokens, and vectors over tokens.
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries <= length * heads * 128 * 2 / 4


def test_stretches_meet_between_writing_and_reading(rtx3060, monkeypatch, tmp_path):
    """The interpreter has one thread where the GPU has four warps."""
    from pallas_kernels.ssd.narrow import cases

    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shape = SHAPES["bitmamba2_255m"]._replace(length=128, n_heads=1, n_groups=1)
    with jax.default_device(rtx3060.devices[0]):
        kernels = cases.of_shape(shape, BF16)

    for _, function, arguments in kernels:
        compile_for(rtx3060, function, *arguments)

    programs = sorted(tmp_path.glob("*.ptx"))
    assert len(programs) == len(kernels) == 4
    for program in programs:
        steps = re.findall(r"(st|ld)\.shared|(bar)\.sync", program.read_text())
        order = [a or b for a, b in steps]
        read = order.index("ld")
        written = max(i for i, step in enumerate(order) if step == "st")
        assert "bar" in order[written:read], program.name
