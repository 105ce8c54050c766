"""The kernels of the scan, interpreted: outputs and every gradient, races raised.

The interpreter starts every output and all scratch as NaN: what is finite was written.
It plays a Hopper GPU; that cp.async is waited for as TMA is has not been run.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases

from pallas_kernels import backend, compat, ssd

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


@pytest.fixture
def several_heads(monkeypatch):
    """A block goes through all heads of a group, as where there are many blocks."""
    from pallas_kernels.ssd import layout

    monkeypatch.setattr(layout, "_BLOCKS", 1)


# Documents that end in every place about the halves of a chunk of 128 and its end.
EDGES = (63, 1, 1, 62, 1, 1, 2)


@pytest.mark.parametrize(
    ("form", "shape", "skip", "dtype", "lengths"),
    [
        ("mma", (1, 70, 4, 64, 2, 16), "channel", jnp.bfloat16, (9, 40, 1, 20)),
        ("mma", (1, 70, 4, 64, 2, 16), "head", jnp.float32, (9, 40, 1, 20)),
        ("wgmma", (1, 131, 3, 64, 1, 32), "head", jnp.bfloat16, EDGES),
    ],
    ids=["bf16", "f32", "hopper"],
)
def test_equal_the_recurrence_and_the_reference(
    form, shape, skip, dtype, lengths, several_heads
):
    from pallas_kernels import mosaic

    inputs, cotangents = cases.make_rounded(shape, dtype, skip=skip)
    ids = cases.segments(*lengths)

    with mosaic.races_raise():
        new = cases.compile_chunked()
        got = cases.by_kernels(inputs, cotangents, ids, form=form, chunked=new)
    want = cases.truth(inputs, cotangents, ids)
    reference = cases.chunked(inputs, cotangents, ids, 64)

    assert got["y"].dtype == got["dx"].dtype == got["dB"].dtype == dtype
    assert got["final_state"].dtype == got["dinitial_state"].dtype == jnp.float32
    cases.assert_close(got, want, cases.KERNEL_LIMITS[dtype])
    # Both have rounded their results to dtype.
    both = {name: 2 * limit for name, limit in cases.KERNEL_LIMITS[dtype].items()}
    cases.assert_close(got, reference, both)


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        pytest.param("mma", (2, 64, 2, 128, 2, 2), marks=pytest.mark.once),
        ("mma", (1, 5, 2, 72, 1, 20)),
        pytest.param("wgmma", (2, 5, 2, 72, 2, 128), marks=pytest.mark.once),
    ],
    ids=["P128N2", "P72N20", "hopperP72N128"],
)
def test_other_sizes_without_documents(form, shape, several_heads):
    inputs, cotangents = cases.make_rounded(shape, jnp.bfloat16, skip="none")

    got = cases.by_kernels(inputs, cotangents, None, form=form)
    want = cases.truth(inputs, cotangents)

    assert got.keys() == want.keys()
    cases.assert_close(got, want, cases.KERNEL_LIMITS[jnp.bfloat16])


def test_hopper_kernels_take_what_they_have_a_form_for():
    from pallas_kernels.ssd.kernel_vjp import form_for

    def form(n, dtype):
        x, maps = jnp.ones((1, 4, 2, 64), dtype), jnp.ones((1, 4, 1, n), dtype)
        return form_for(x, maps, maps)

    assert form(128, jnp.bfloat16) == "mma"
    with backend.products_by("wgmma"):
        assert form(128, jnp.bfloat16) == form(17, jnp.bfloat16) == "wgmma"
        assert form(16, jnp.bfloat16) == form(128, jnp.float32) == "mma"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": jnp.ones((1, 4, 1, 144))}, "B: got d_state 144; expected at most 128"),
        ({"x": jnp.ones((1, 4, 2, 64), jnp.float16)}, "x: got float16; expected"),
    ],
    ids=["N144", "f16"],
)
def test_what_the_kernels_cannot_take_is_named(change, message):
    inputs = {"x": jnp.ones((1, 4, 2, 64)), "B": jnp.ones((1, 4, 1, 16))} | change
    dt, A = jnp.ones((1, 4, 2)), -jnp.ones(2)

    with pytest.raises(NotImplementedError, match=message):
        ssd(
            inputs["x"],
            dt,
            A,
            inputs["B"],
            inputs["B"],
            chunk_size=4,
            implementation="pallas",
        )


def test_a_result_of_mma_is_a_left_operand_without_a_move():
    """`tiles.as_lhs` renames registers, which the interpreter does not simulate."""
    from pallas_kernels.mosaic import mgpu
    from pallas_kernels.ssd import tiles

    layouts = mgpu.MMALayouts(tiles.HALF)

    result, operand = (elements(x, (64, 32)) for x in (layouts.acc, layouts.lhs))
    np.testing.assert_array_equal(result, operand)


def elements(layout, shape):
    """Which element of an array each (warp, lane, register, half) holds."""
    order = np.arange(shape[0] * shape[1]).reshape(shape)
    for tile in layout.tiling.tiles:
        whole, rest = order.shape[: -len(tile)], order.shape[-len(tile) :]
        cut = [(n // t, t) for n, t in zip(rest, tile, strict=True)]
        order = order.reshape(*whole, *np.ravel(cut))
        first, last = len(whole), order.ndim
        outer, inner = range(first, last, 2), range(first + 1, last, 2)
        order = order.transpose(*range(first), *outer, *inner)
    threads = (*layout.partitioned_warp_dims, *layout.partitioned_lane_dims)
    threads = [d + order.ndim for d in threads]
    half = layout.vector_dim + order.ndim
    registers = [d for d in range(order.ndim) if d not in threads and d != half]
    return order.transpose(*threads, *registers, half).reshape(4, 32, -1, 2)
