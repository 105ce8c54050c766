"""The kernels of the scan, interpreted, with values and documents that are hard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases

from pallas_kernels import backend, compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


# Operands in two parts show errors that the rounding of one would hide; Hopper's form
# takes one part, and this is more than a chunk of it.
FORMS = {
    "mma": ((1, 70, 2, 64, 1, 16), jnp.float32),
    "wgmma": ((1, 131, 1, 64, 1, 32), jnp.bfloat16),
}
both_forms = pytest.mark.parametrize("form", FORMS)


@both_forms
@pytest.mark.parametrize(
    ("dt", "A"),
    [((0.5, 8.0), (1.0, 16.0)), ((0.0, 100.0), (1e3, 1e3)), ((0.0, 0.0), (1.0, 16.0))],
    ids=["large", "huge", "zero"],
)
def test_extreme_step_sizes(dt, A, form):
    shape, dtype = FORMS[form]
    inputs, cotangents = cases.make_rounded(shape, dtype, dt=dt, A=A)
    ids = cases.segments(shape[1])

    got = cases.by_kernels(inputs, cotangents, ids, form=form)
    want = cases.truth(inputs, cotangents, ids)

    # What float32 cannot hold is zero.
    want = {name: np.float32(value) for name, value in want.items()}
    cases.assert_close(got, want, cases.KERNEL_LIMITS[dtype])


@both_forms
def test_one_huge_step_does_not_blur_its_neighbours(form):
    shape, dtype = FORMS[form]
    inputs = cases.make_inputs(shape, dt=(1e-4, 1e-3), A=(0.5, 1.0))
    inputs["dt"][0, ::7] = 1e4
    inputs["dt"][0, ::5] = 0
    dy, dstate = cases.make_cotangents(shape)
    inputs, cotangents = cases.cast(inputs, dtype), (cases.rounded(dy, dtype), dstate)
    ids = cases.segments(shape[1])

    got = cases.by_kernels(inputs, cotangents, ids, form=form)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, cases.KERNEL_LIMITS[dtype])


@both_forms
@pytest.mark.parametrize(
    "cuts", [(1, 2, 3), (63, 64, 65), tuple(range(1, 131))], ids=["ends", "64", "all"]
)
def test_boundaries_anywhere(cuts, form):
    shape, dtype = FORMS[form]
    inputs, cotangents = cases.make_rounded(shape, dtype)
    ids = cases.cut(shape[1], cuts)

    got = cases.by_kernels(inputs, cotangents, ids, form=form)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, cases.KERNEL_LIMITS[dtype])


@pytest.mark.parametrize("form", ["mma", pytest.param("wgmma", marks=pytest.mark.once)])
def test_recomputed_states_give_the_same_bits_every_time(form):
    from pallas_kernels.ssd.kernel_vjp import scan_by_kernels

    shape, dtype = FORMS[form]
    inputs, cotangents = cases.make_rounded(shape, dtype)
    ids = cases.segments(20, shape[1] - 20)

    def run(i):
        args = [i[k] for k in cases.NAMES[:6]]
        rest = (jnp.asarray(ids), i["initial_state"])
        return scan_by_kernels(*args, *rest, save_states=False)

    with backend.products_by(form):
        again = jax.jit(lambda i: cases._with_gradients(run, i, cotangents))
        recomputed = again(inputs)
    saved, again = (
        cases.by_kernels(inputs, cotangents, ids, form=form) for _ in range(2)
    )

    for name, value in saved.items():
        np.testing.assert_array_equal(value, recomputed[name], err_msg=name)
        np.testing.assert_array_equal(value, again[name], err_msg=name)
