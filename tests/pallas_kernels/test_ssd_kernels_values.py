"""The kernels of the scan, interpreted, with values and documents that are hard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases

from pallas_kernels import compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


@pytest.mark.parametrize(
    ("dt", "A"),
    [((0.5, 8.0), (1.0, 16.0)), ((0.0, 100.0), (1e3, 1e3)), ((0.0, 0.0), (1.0, 16.0))],
    ids=["large", "huge", "zero"],
)
def test_extreme_step_sizes(dt, A):
    inputs, cotangents = cases.make_rounded(
        (1, 70, 2, 64, 1, 16), jnp.float32, dt=dt, A=A
    )
    ids = cases.segments(70)

    got = cases.by_kernels(inputs, cotangents, ids)
    want = cases.truth(inputs, cotangents, ids)

    # What float32 cannot hold is zero.
    want = {name: np.float32(value) for name, value in want.items()}
    cases.assert_close(got, want, cases.KERNEL_LIMITS[jnp.float32])


def test_one_huge_step_does_not_blur_its_neighbours():
    shape = (1, 70, 2, 64, 1, 16)
    inputs = cases.make_inputs(shape, dt=(1e-4, 1e-3), A=(0.5, 1.0))
    inputs["dt"][0, ::7] = 1e4
    inputs["dt"][0, ::5] = 0
    inputs, cotangents = cases.cast(inputs, np.float32), cases.make_cotangents(shape)
    ids = cases.segments(70)

    got = cases.by_kernels(inputs, cotangents, ids)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, cases.KERNEL_LIMITS[jnp.float32])


@pytest.mark.parametrize(
    "cuts", [(1, 2, 3), (63, 64, 65), tuple(range(1, 70))], ids=str
)
def test_boundaries_anywhere(cuts):
    inputs, cotangents = cases.make_rounded((1, 70, 2, 64, 1, 16), jnp.float32)
    ids = cases.cut(70, cuts)

    got = cases.by_kernels(inputs, cotangents, ids)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, cases.KERNEL_LIMITS[jnp.float32])


def test_recomputed_states_give_the_same_bits_every_time():
    from pallas_kernels.ssd.kernel_vjp import scan_by_kernels

    inputs, cotangents = cases.make_rounded((1, 70, 2, 64, 1, 16), jnp.float32)
    ids = cases.segments(20, 50)

    def run(i):
        args = [i[k] for k in cases.NAMES[:6]]
        rest = (jnp.asarray(ids), i["initial_state"])
        return scan_by_kernels(*args, *rest, save_states=False)

    recomputed = jax.jit(lambda i: cases._with_gradients(run, i, cotangents))(inputs)
    saved, again = (cases.by_kernels(inputs, cotangents, ids) for _ in range(2))

    for name, value in saved.items():
        np.testing.assert_array_equal(value, recomputed[name], err_msg=name)
        np.testing.assert_array_equal(value, again[name], err_msg=name)
