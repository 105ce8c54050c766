"""The kernels for one state per channel, interpreted: races raised, against float64.

The interpreter starts every output and all scratch as NaN: what is finite was written.
That stretches exchange their ends behind a barrier it cannot check, a warpgroup being
one thread to it: absent_gpu/test_ssd_program.py does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases
from test_ssd_documents import PER_TOKEN

from pallas_kernels import compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)
# No tensor cores: float32 is float32, and bfloat16 is rounded once, on the way out. dA
# is a sum of both signs over all tokens; below it is once a 500th of its terms.
FLOAT32 = {"all": 2e-6, "dA": 2e-5}
ROUNDED = {name: 4e-3 for name in ("y", "dx", "dB", "dC")}
LIMITS = {jnp.float32: FLOAT32, jnp.bfloat16: FLOAT32 | ROUNDED}
# With stretches of 2 tokens, four to a tile: three tiles, the last of them padded.
SHAPE = (1, 21, 1, 128, 1, 1)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch):
    """Stretches of 2 tokens, so that a few tokens cross them."""
    from pallas_kernels.ssd.narrow import vjp

    monkeypatch.setattr(vjp, "STRETCH", 2)


@pytest.fixture(scope="module")
def chunked(users_level):
    """The scan as users have it; compiled once for the tests of SHAPE."""
    return cases.compile_chunked(users_level)


def assert_true_to_float64(
    inputs, cotangents, ids, chunked=cases.chunked, dtype=jnp.float32
):
    """The kernels' outputs and gradients, after they were compared with the truth."""
    got = cases.by_kernels(inputs, cotangents, ids, chunked)
    # What float32 cannot hold is zero.
    want = cases.truth(inputs, cotangents, ids)
    want = {name: np.float32(value) for name, value in want.items()}
    cases.assert_close(got, want, LIMITS[dtype])
    return got


@pytest.mark.parametrize(
    ("shape", "stretch", "skip", "dtype", "lengths"),
    [
        ((1, 34, 1, 72, 1, 1), 8, "head", jnp.bfloat16, (9, 1, 18, 6)),
        ((2, 9, 4, 128, 2, 1), 2, "none", jnp.float32, None),
    ],
    ids=["bf16-P72-as-users-have-it", "f32-H4G2-no-documents"],
)
def test_equal_the_recurrence(shape, stretch, skip, dtype, lengths, monkeypatch):
    from pallas_kernels import mosaic
    from pallas_kernels.ssd.narrow import vjp

    monkeypatch.setattr(vjp, "STRETCH", stretch)
    inputs, cotangents = cases.make_rounded(shape, dtype, skip=skip)
    ids = lengths and cases.segments(*lengths)

    with mosaic.races_raise():
        got = assert_true_to_float64(inputs, cotangents, ids, dtype=dtype)

    assert got["y"].dtype == got["dx"].dtype == got["dB"].dtype == dtype
    assert got["final_state"].dtype == got["dinitial_state"].dtype == jnp.float32
    assert got["ddt"].dtype == got["dA"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("dt", "A"),
    [((0.5, 8.0), (1.0, 16.0)), ((0.0, 100.0), (1e3, 1e3)), ((0.0, 0.0), (1.0, 16.0))],
    ids=["large", "huge", "zero"],
)
def test_extreme_step_sizes(dt, A, chunked):
    inputs, cotangents = cases.make_rounded(SHAPE, jnp.float32, dt=dt, A=A)

    assert_true_to_float64(inputs, cotangents, cases.segments(21), chunked)


def test_one_huge_step_does_not_blur_its_neighbours(chunked):
    inputs = cases.make_inputs(SHAPE, dt=(1e-4, 1e-3), A=(0.5, 1.0))
    inputs["dt"][0, ::7] = 1e4
    inputs["dt"][0, ::5] = 0

    inputs, cotangents = cases.cast(inputs, np.float32), cases.make_cotangents(SHAPE)
    assert_true_to_float64(inputs, cotangents, cases.segments(21), chunked)


@pytest.mark.parametrize(
    "cuts", [(1, 2, 3), (4, 7, 8, 9), (16,), tuple(range(1, 21))], ids=str
)
def test_boundaries_anywhere(cuts, chunked):
    inputs, cotangents = cases.make_rounded(SHAPE, jnp.float32)

    assert_true_to_float64(inputs, cotangents, cases.cut(21, cuts), chunked)


def test_recomputed_states_give_the_same_bits_every_time(chunked, users_level):
    from pallas_kernels.ssd.kernel_vjp import scan_by_kernels

    inputs, cotangents = cases.make_rounded(SHAPE, jnp.float32)
    ids = cases.segments(7, 14)

    def run(i):
        args = [i[k] for k in cases.NAMES[:6]]
        rest = (jnp.asarray(ids), i["initial_state"])
        return scan_by_kernels(*args, *rest, save_states=False)

    recompute = jax.jit(
        lambda i: cases._with_gradients(run, i, cotangents),
        compiler_options=users_level,
    )
    recomputed = recompute(inputs)
    saved, again = (
        cases.by_kernels(inputs, cotangents, ids, chunked) for _ in range(2)
    )

    for name, value in saved.items():
        np.testing.assert_array_equal(value, recomputed[name], err_msg=name)
        np.testing.assert_array_equal(value, again[name], err_msg=name)


def test_rows_in_pieces(monkeypatch):
    """The second document is all of the second piece; heads are two blocks wide."""
    from pallas_kernels.ssd.narrow import pieces, vjp

    monkeypatch.setattr(pieces, "count", lambda sizes: 3)
    monkeypatch.setattr(vjp, "STRETCH", 1)
    inputs, cotangents = cases.make_rounded((1, 12, 1, 256, 1, 1), jnp.float32)

    assert_true_to_float64(inputs, cotangents, cases.segments(3, 6, 3))


@pytest.mark.parametrize(
    ("capability", "batch", "length", "count"),
    [
        ((8, 6), 1, 4096, 1),
        ((9, 0), 1, 4096, 4),
        ((9, 0), 2, 4096, 2),
        ((9, 0), 8, 4096, 1),
        ((8, 0), 1, 96, 3),
        ((9, 0), 1, 32, 1),
    ],
)
def test_pieces_fill_a_gpu_that_rows_do_not(
    capability, batch, length, count, monkeypatch
):
    from pallas_kernels.ssd.narrow import pieces, tile

    monkeypatch.setattr(pieces.backend, "capability", lambda: capability)

    assert pieces.count(tile.Sizes(batch, length, 32, 128, 32, 8)) == count


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("document", [0, 1, 4])
def test_a_bad_document_moves_no_bit_of_the_others(document, bad, chunked):
    ids = cases.segments(5, 8, 1, 1, 6)
    chosen = ids == document
    clean = cases.make_inputs(SHAPE)
    dy, dstate = cases.make_cotangents(SHAPE)
    spoilt, bad_dy = dict(clean), np.where(chosen[..., None, None], bad, dy)
    for name in ("x", "B", "C"):
        spoilt[name] = np.where(chosen[..., None, None], bad, clean[name])

    before, after = (
        cases.by_kernels(cases.cast(i, jnp.float32), (d, dstate), ids, chunked)
        for i, d in ((clean, dy), (spoilt, bad_dy))
    )

    for name in PER_TOKEN:
        a, b = (np.asarray(t[name])[~chosen] for t in (before, after))
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b, err_msg=name)
    for name, last in (("dinitial_state", 0), ("final_state", 4)):
        if document != last:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert not np.isfinite(np.asarray(after["y"])[chosen]).all()
