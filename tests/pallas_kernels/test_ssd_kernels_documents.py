"""Documents never touch each other in the kernels, to the bit; interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases
from test_ssd_documents import PER_TOKEN, _change

from pallas_kernels import backend, compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


@pytest.fixture(scope="module")
def compiled(users_level):
    """The scan as users have it, for what must be equal to the bit; by form."""
    return {form: cases.compile_chunked(users_level) for form in backend.PRODUCTS}


@pytest.mark.parametrize(
    ("form", "scale", "document"),
    [
        ("mma", 1.0, 1),
        ("mma", 1e12, 3),
        ("mma", 1e30, 0),
        ("mma", 1e30, 1),
        ("wgmma", 1.0, 1),
        ("wgmma", 1e30, 1),
        ("wgmma", 1e30, 2),
    ],
)
def test_a_changed_document_moves_no_bit_of_the_others(form, scale, document, compiled):
    shape = (1, 70, 2, 64, 1, 16) if form == "mma" else (1, 134, 1, 64, 1, 32)
    # Hopper's: one document lies across the chunk's end, and another follows it there.
    lengths = (9, 40, 1, 20) if form == "mma" else (9, 55, 68, 2)
    dtype, ids = jnp.bfloat16, cases.segments(*lengths)
    chosen = ids == document
    inputs = cases.make_inputs(shape, dt=(1e-3, 2.0))
    dy, dstate = cases.make_cotangents(shape)
    changed, changed_dy = _change(inputs, dy, chosen, scale, 0)

    before, after = (
        cases.by_kernels(
            cases.cast(i, dtype), (d, dstate), ids, form=form, chunked=compiled[form]
        )
        for i, d in ((inputs, dy), (changed, changed_dy))
    )

    for name in PER_TOKEN:
        a = np.asarray(before[name], np.float32)[~chosen]
        b = np.asarray(after[name], np.float32)[~chosen]
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert np.asarray(before["y"] != after["y"])[chosen].any()
