"""The kernels of the scan, interpreted: outputs and every gradient, races raised.

The interpreter starts every output and all scratch as NaN: what is finite was written.
It plays a Hopper GPU; that cp.async is waited for as TMA is has not been run.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases

from pallas_kernels import compat, ssd

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


@pytest.mark.parametrize(
    ("shape", "skip", "dtype", "lengths"),
    [
        ((1, 70, 4, 64, 2, 16), "channel", jnp.bfloat16, (9, 40, 1, 20)),
        ((1, 70, 4, 64, 2, 16), "head", jnp.float32, (9, 40, 1, 20)),
    ],
    ids=["bf16", "f32"],
)
def test_equal_the_recurrence_and_the_reference(shape, skip, dtype, lengths):
    from pallas_kernels import mosaic

    inputs, cotangents = cases.make_rounded(shape, dtype, skip=skip)
    ids = cases.segments(*lengths)

    with mosaic.races_raise():
        got = cases.by_kernels(inputs, cotangents, ids, cases.compile_chunked())
    want = cases.truth(inputs, cotangents, ids)
    reference = cases.chunked(inputs, cotangents, ids, 64)

    assert got["y"].dtype == got["dx"].dtype == got["dB"].dtype == dtype
    assert got["final_state"].dtype == got["dinitial_state"].dtype == jnp.float32
    cases.assert_close(got, want, cases.KERNEL_LIMITS[dtype])
    # Both have rounded their results to dtype.
    both = {name: 2 * limit for name, limit in cases.KERNEL_LIMITS[dtype].items()}
    cases.assert_close(got, reference, both)


@pytest.mark.parametrize(
    "shape", [(2, 64, 2, 128, 2, 2), (1, 5, 2, 72, 1, 20)], ids=["P128N2", "P72N20"]
)
def test_other_sizes_without_documents(shape):
    inputs, cotangents = cases.make_rounded(shape, jnp.bfloat16, skip="none")

    got = cases.by_kernels(inputs, cotangents, None)
    want = cases.truth(inputs, cotangents)

    assert got.keys() == want.keys()
    cases.assert_close(got, want, cases.KERNEL_LIMITS[jnp.bfloat16])


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
