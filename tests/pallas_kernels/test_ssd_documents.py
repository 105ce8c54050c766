"""Documents in one packed row never touch each other, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ssd
from pallas_kernels.ssd.reference import token_scan

pytestmark = pytest.mark.newest

PER_TOKEN = ("y", "dx", "ddt", "dB", "dC")


@pytest.fixture(scope="module")
def chunked(users_level):
    """The scan as users have it, for what must be equal to the bit."""
    return cases.compile_chunked(users_level)


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.sets(st.integers(1, 21), max_size=10),
    seed=st.integers(0, 1000),
)
def test_boundaries_anywhere_equal_the_recurrence(cuts, seed):
    shape = (1, 22, 2, 3, 1, 4)
    inputs = cases.cast(cases.make_inputs(shape, seed), np.float32)
    cotangents, ids = cases.make_cotangents(shape, seed), cases.cut(22, cuts)

    got = cases.chunked(inputs, cotangents, ids, 8)
    want = cases.truth(inputs, cotangents, ids)

    cases.assert_close(got, want, {"all": 5e-6, "dA": 1e-5})


def test_case_b031_one_token_documents_equal_themselves_alone():
    shape = (1, 11, 4, 3, 2, 8)
    inputs = cases.cast(cases.make_inputs(shape), np.float32)

    def run(part, **rest):
        x, dt, B, C = (inputs[k][:, part] for k in ("x", "dt", "B", "C"))
        return ssd(x, dt, inputs["A"], B, C, D=inputs["D"], chunk_size=8, **rest)

    packed = run(slice(None), segment_ids=jnp.asarray(cases.segments(5, 1, 1, 4)))
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 11)):
        alone = run(slice(start, end))
        assert cases.relative_error(packed.y[:, start:end], alone.y) < 1e-6
    assert cases.relative_error(packed.final_state, alone.final_state) < 1e-6


def test_a_repeated_id_is_a_new_document():
    shape = (1, 22, 2, 3, 1, 4)
    inputs = cases.cast(cases.make_inputs(shape), np.float32)
    cotangents = cases.make_cotangents(shape)
    again = np.array([[7] * 4 + [3] * 4 + [7] * 14], np.int32)

    got = cases.chunked(inputs, cotangents, again, 8)
    want = cases.truth(inputs, cotangents, cases.segments(4, 4, 14))

    cases.assert_close(got, want, {"all": 3e-6, "dA": 1e-5})


def test_the_initial_state_belongs_to_the_first_document():
    shape = (1, 12, 2, 3, 1, 4)
    i = cases.cast(cases.make_inputs(shape), np.float32)
    args = [i[k] for k in cases.NAMES[:5]]

    def run(state):
        ids = jnp.asarray(cases.segments(3, 9))
        return ssd(*args, segment_ids=ids, chunk_size=8, initial_state=state)

    with_state, without = run(i["initial_state"]), run(None)

    assert (with_state.y[:, :3] != without.y[:, :3]).any()
    np.testing.assert_array_equal(with_state.y[:, 3:], without.y[:, 3:])
    np.testing.assert_array_equal(with_state.final_state, without.final_state)


def _change(inputs, dy, chosen, scale, seed):
    """Every token value of the chosen document replaced, cotangents too."""
    rng = np.random.default_rng(seed)
    inputs = dict(inputs)
    for name in ("x", "B", "C", "dt"):
        new = scale * rng.normal(size=inputs[name].shape)
        new = np.abs(new) if name == "dt" else new
        mask = chosen.reshape(chosen.shape + (1,) * (new.ndim - 2))
        inputs[name] = np.where(mask, new, inputs[name])
    dy = np.where(chosen[..., None, None], scale * rng.normal(size=dy.shape), dy)
    return inputs, dy


def _recurrence(inputs, cotangents, segment_ids, chunk_size):
    del chunk_size  # the recurrence has none

    def run(i):
        args = [i[k] for k in cases.NAMES[:6]]
        return token_scan(*args, segment_ids, i["initial_state"])

    out, pullback = jax.vjp(run, inputs)
    (grads,) = pullback(tuple(jnp.float32(c) for c in cotangents))
    grads = {f"d{k}": v for k, v in grads.items()}
    return {"y": out[0], **grads}


@pytest.mark.parametrize("scale", [1.0, 1e12, 1e30])
@pytest.mark.parametrize(
    ("groups_n", "dtype"),
    [((1, 8), jnp.float32), ((1, 8), jnp.bfloat16), ((4, 1), jnp.float32)],
    ids=["G1N8-f32", "G1N8-bf16", "G4N1-f32"],
)
def test_case_b028_a_changed_document_moves_no_bit_of_the_others(
    groups_n, dtype, scale, chunked
):
    shape = (1, 44, 4, 5, *groups_n)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        starts = rng.random((1, 44)) < 0.15
        ids = np.cumsum(starts, 1).astype(np.int32)
        chosen = ids == ids[0, rng.integers(44)]
        inputs = cases.make_inputs(shape, seed, dt=(1e-3, 2.0))
        dy, dstate = cases.make_cotangents(shape, seed)
        changed, changed_dy = _change(inputs, dy, chosen, scale, seed)

        before = chunked(cases.cast(inputs, dtype), (dy, dstate), ids, 16)
        changed = cases.cast(changed, dtype)
        after = chunked(changed, (changed_dy, dstate), ids, 16)

        for name in PER_TOKEN:
            a = np.asarray(before[name], np.float32)[~chosen]
            b = np.asarray(after[name], np.float32)[~chosen]
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b, err_msg=f"{name}, seed {seed}")
        moved = np.asarray(before["y"] != after["y"])[chosen]
        assert moved.any()


def test_case_b030_every_path_keeps_the_boundaries(chunked, users_level):
    shape = (1, 22, 2, 3, 1, 4)
    inputs = cases.make_inputs(shape)
    dy, dstate = cases.make_cotangents(shape)
    ids = cases.segments(6, 16)
    last_of_first = np.arange(22)[None] == 5
    changed, _ = _change(inputs, dy, last_of_first, 1.0, 5)

    options = {"static_argnames": "chunk_size", "compiler_options": users_level}
    for path in (chunked, jax.jit(_recurrence, **options)):
        a, b = (
            path(cases.cast(i, np.float32), (dy, dstate), ids, 8)
            for i in (inputs, changed)
        )
        for name in PER_TOKEN:
            first, second = np.asarray(a[name]), np.asarray(b[name])
            np.testing.assert_array_equal(first[:, 6:], second[:, 6:], err_msg=name)
            assert (first[:, :6] != second[:, :6]).any(), name
