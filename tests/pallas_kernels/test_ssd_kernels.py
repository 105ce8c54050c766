"""The kernels of the scan, interpreted: outputs and every gradient, races raised.

The interpreter starts every output and all scratch as NaN: what is finite was written.
It plays a Hopper GPU; that cp.async is waited for as TMA is has not been run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases

from pallas_kernels import compat, ssd

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)

# Operands of the products are rounded to 8 bits, 2^-9 relative each. dA is a sum of
# terms of both signs over all tokens and may be small beside them.
BFLOAT16 = {"all": 5e-3, "dA": 1e-2}
# Operands have 16 bits in two parts; the product of the two small parts is left out.
FLOAT32 = {"all": 2e-5, "dA": 2e-4}
LIMITS = {jnp.bfloat16: BFLOAT16, jnp.float32: FLOAT32}


def make(shape, dtype, **options):
    """(inputs, cotangents), rounded to dtype as the function receives them."""
    inputs = cases.cast(cases.make_inputs(shape, **options), dtype)
    dy, dstate = cases.make_cotangents(shape)
    return inputs, (np.float64(jnp.asarray(dy, dtype)), dstate)


def by_kernels(inputs, cotangents, segment_ids, chunked=cases.chunked):
    return chunked(inputs, cotangents, segment_ids, 64, "pallas")


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

    inputs, cotangents = make(shape, dtype, skip=skip)
    ids = cases.segments(*lengths)

    with mosaic.races_raise():
        got = by_kernels(inputs, cotangents, ids, cases.compile_chunked())
    want = cases.truth(inputs, cotangents, ids)
    reference = cases.chunked(inputs, cotangents, ids, 64)

    assert got["y"].dtype == got["dx"].dtype == got["dB"].dtype == dtype
    assert got["final_state"].dtype == got["dinitial_state"].dtype == jnp.float32
    cases.assert_close(got, want, LIMITS[dtype])
    # Both have rounded their results to dtype.
    both = {name: 2 * limit for name, limit in LIMITS[dtype].items()}
    cases.assert_close(got, reference, both)


@pytest.mark.parametrize(
    "shape", [(2, 64, 2, 128, 2, 1), (1, 5, 2, 72, 1, 20)], ids=["P128N1", "P72N20"]
)
def test_other_sizes_without_documents(shape):
    inputs, cotangents = make(shape, jnp.bfloat16, skip="none")

    got = by_kernels(inputs, cotangents, None)
    want = cases.truth(inputs, cotangents)

    assert got.keys() == want.keys()
    cases.assert_close(got, want, BFLOAT16)


@pytest.mark.parametrize(
    ("dt", "A"),
    [((0.5, 8.0), (1.0, 16.0)), ((0.0, 100.0), (1e3, 1e3)), ((0.0, 0.0), (1.0, 16.0))],
    ids=["large", "huge", "zero"],
)
def test_extreme_step_sizes(dt, A):
    inputs, cotangents = make((1, 70, 2, 64, 1, 16), jnp.float32, dt=dt, A=A)
    ids = cases.segments(70)

    got = by_kernels(inputs, cotangents, ids)
    want = cases.truth(inputs, cotangents, ids)

    # What float32 cannot hold is zero.
    want = {name: np.float32(value) for name, value in want.items()}
    cases.assert_close(got, want, FLOAT32)


def test_one_huge_step_does_not_blur_its_neighbours():
    shape = (1, 70, 2, 64, 1, 16)
    inputs = cases.make_inputs(shape, dt=(1e-4, 1e-3), A=(0.5, 1.0))
    inputs["dt"][0, ::7] = 1e4
    inputs["dt"][0, ::5] = 0
    inputs, cotangents = cases.cast(inputs, np.float32), cases.make_cotangents(shape)
    ids = cases.segments(70)

    got = by_kernels(inputs, cotangents, ids)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, FLOAT32)


@pytest.mark.parametrize(
    "cuts", [(1, 2, 3), (63, 64, 65), tuple(range(1, 70))], ids=str
)
def test_boundaries_anywhere(cuts):
    inputs, cotangents = make((1, 70, 2, 64, 1, 16), jnp.float32)
    ids = cases.cut(70, cuts)

    got = by_kernels(inputs, cotangents, ids)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, FLOAT32)


def test_recomputed_states_give_the_same_bits_every_time():
    from pallas_kernels.ssd.kernel_vjp import scan_by_kernels

    inputs, cotangents = make((1, 70, 2, 64, 1, 16), jnp.float32)
    ids = cases.segments(20, 50)

    def run(i):
        args = [i[k] for k in cases.NAMES[:6]]
        rest = (jnp.asarray(ids), i["initial_state"])
        return scan_by_kernels(*args, *rest, save_states=False)

    recomputed = jax.jit(lambda i: cases._with_gradients(run, i, cotangents))(inputs)
    saved, again = (by_kernels(inputs, cotangents, ids) for _ in range(2))

    for name, value in saved.items():
        np.testing.assert_array_equal(value, recomputed[name], err_msg=name)
        np.testing.assert_array_equal(value, again[name], err_msg=name)


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
