"""The chunked scan against the recurrence in float64: outputs and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend, ssd, ssd_step
from pallas_kernels.ssd import refusals
from pallas_kernels.ssd.shapes import SHAPES

FLOAT32 = {"all": 3e-6, "dA": 5e-6}
# x, B, C and y, dx, dB, dC are rounded to 8 bits, 2^-9 relative each.
BFLOAT16 = {"all": 4e-3, "dA": 5e-6, "ddt": 5e-6, "dD": 5e-6, "final_state": 5e-6}


def test_token_scan_equals_a_numpy_loop():
    shape = (2, 7, 4, 3, 2, 5)
    inputs = cases.make_inputs(shape, skip="head")
    ids = np.repeat([[0, 1]], [4, 3], axis=1).repeat(2, axis=0)

    x, dt, A, B, C, D, state = (inputs[k] for k in cases.NAMES)
    y = np.zeros_like(x)
    state = state.copy()
    for b, t, h in np.ndindex(2, 7, 4):
        decay = 0.0 if t == 4 else np.exp(dt[b, t, h] * A[h])
        added = dt[b, t, h] * np.outer(x[b, t, h], B[b, t, h // 2])
        state[b, h] = decay * state[b, h] + added
        y[b, t, h] = state[b, h] @ C[b, t, h // 2] + D[h] * x[b, t, h]
    got = cases.truth(inputs, cases.make_cotangents(shape), ids.astype(np.int32))

    np.testing.assert_allclose(got["y"], y, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(got["final_state"], state, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "chunk_size", "skip", "dtype"),
    [
        ((2, 29, 4, 3, 2, 16), 8, "channel", jnp.float32),
        ((2, 37, 4, 6, 4, 1), 64, "channel", jnp.float32),
        ((1, 13, 3, 4, 1, 1), 64, "none", jnp.float32),
        ((1, 5, 2, 4, 2, 16), 1, "head", jnp.float32),
        ((2, 29, 4, 3, 2, 16), 8, "head", jnp.bfloat16),
    ],
    ids=["G2N16-f32", "G4N1-f32", "no_skip-f32", "chunk1-f32", "G2N16-bf16"],
)
def test_equals_the_recurrence(shape, chunk_size, skip, dtype):
    inputs = cases.cast(cases.make_inputs(shape, skip=skip), dtype)
    cotangents = cases.make_cotangents(shape)
    cotangents = (jnp.asarray(cotangents[0], dtype), cotangents[1])

    got = cases.chunked(inputs, cotangents, None, chunk_size)
    want = cases.truth(inputs, tuple(np.float64(c) for c in cotangents))

    assert got["y"].dtype == got["dx"].dtype == dtype
    assert got["final_state"].dtype == jnp.float32
    cases.assert_close(got, want, FLOAT32 if dtype == jnp.float32 else BFLOAT16)


def test_float64_inputs_run_in_float64():
    shape = (2, 37, 4, 3, 2, 5)
    inputs, cotangents = cases.make_inputs(shape), cases.make_cotangents(shape)
    ids = np.repeat(cases.segments(5, 1, 1, 20, 10), 2, axis=0)

    want = cases.truth(inputs, cotangents, ids)
    with jax.enable_x64(True):
        inputs = cases.cast(inputs, np.float64)
        got = cases.chunked(inputs, cotangents, jnp.asarray(ids), 16)
        got = jax.tree.map(np.asarray, got)

    assert {v.dtype for v in got.values()} == {np.dtype(np.float64)}
    cases.assert_close(got, want, 1e-14)


@pytest.mark.parametrize(
    ("dt", "A"),
    [
        ((0.5, 8.0), (1.0, 16.0)),
        ((5.0, 5.5), (15.0, 16.0)),
        ((0.0, 1e4), (1e3, 1e3)),
        ((0.0, 1e-7), (1e-3, 1e3)),
        ((0.0, 0.0), (1.0, 16.0)),
    ],
    ids=["large", "uniformly_large", "huge", "tiny", "zero"],
)
def test_extreme_step_sizes(dt, A):
    shape = (1, 96, 3, 4, 1, 8)
    inputs = cases.cast(cases.make_inputs(shape, dt=dt, A=A), np.float32)
    cotangents = cases.make_cotangents(shape)

    got = cases.chunked(inputs, cotangents, None, 64)
    want = cases.truth(inputs, cotangents)

    cases.assert_close(got, want, {"all": 5e-6, "dA": 1e-4})


def test_one_huge_step_does_not_blur_its_neighbours():
    shape = (1, 96, 3, 4, 1, 8)
    inputs = cases.make_inputs(shape, dt=(1e-4, 1e-3), A=(0.5, 1.0))
    inputs["dt"][0, ::7] = 1e4
    inputs["dt"][0, ::5] = 0
    inputs, cotangents = cases.cast(inputs, np.float32), cases.make_cotangents(shape)

    got = cases.chunked(inputs, cotangents, None, 64)
    want = cases.truth(inputs, cotangents)

    cases.assert_close(got, want, {"all": 3e-6, "dA": 1e-5})


def test_case_b061_dt_bias_gradient_is_finite_and_right():
    shape = (2, 29, 4, 3, 2, 16)
    inputs = cases.cast(cases.make_inputs(shape, skip="head"), jnp.bfloat16)
    raw = np.random.default_rng(3).uniform(-100, 100, (2, 29, 4)).astype(np.float32)
    A_log = np.linspace(-5, 5, 4, dtype=np.float32)
    dy, dstate = cases.make_cotangents(shape)
    cotangents = (jnp.asarray(dy, jnp.bfloat16), dstate)

    def dt_bias_gradient(run, inputs, raw, A_log):
        bias = jnp.zeros(4, raw.dtype)
        dt, back_dt = jax.vjp(lambda b: jax.nn.softplus(raw + b), bias)
        A, back_A = jax.vjp(lambda a: -jnp.exp(a), jnp.asarray(A_log))
        out = run({**inputs, "dt": dt, "A": A})
        return out["y"], back_dt(jnp.asarray(out["ddt"]))[0], back_A(out["dA"])[0]

    got = dt_bias_gradient(
        lambda i: cases.chunked(i, cotangents, None, 8), inputs, raw, A_log
    )
    with jax.enable_x64(True):
        raw, A_log = np.float64(raw), np.float64(A_log)
        want = dt_bias_gradient(
            lambda i: cases.truth(i, (np.float64(cotangents[0]), dstate)),
            inputs,
            raw,
            A_log,
        )

    for value, true, limit in zip(got, want, (4e-3, 3e-5, 3e-5), strict=True):
        assert np.isfinite(np.float32(value)).all()
        assert cases.relative_error(value, true) < limit


def test_case_b065_four_pieces_equal_the_whole():
    shape = (2, 256, 4, 8, 2, 16)
    inputs = cases.cast(cases.make_inputs(shape), np.float32)
    tokens = [inputs[k] for k in ("x", "dt", "B", "C")]

    def run(x, dt, B, C, state):
        D = inputs["D"]
        rest = {"D": D, "chunk_size": 64, "initial_state": state}
        return ssd(x, dt, inputs["A"], B, C, **rest)

    whole = run(*tokens, inputs["initial_state"])
    state, pieces = inputs["initial_state"], []
    for start in range(0, 256, 64):
        y, state = run(*(t[:, start : start + 64] for t in tokens), state)
        pieces.append(y)

    np.testing.assert_array_equal(jnp.concatenate(pieces, 1), whole.y)
    np.testing.assert_array_equal(state, whole.final_state)


@pytest.mark.parametrize("groups_n", [(1, 16), (4, 1)], ids=["G1N16", "G4N1"])
def test_steps_equal_the_scan(groups_n):
    shape = (2, 11, 4, 3, *groups_n)
    i = cases.cast(cases.make_inputs(shape, skip="head"), np.float32)
    args = [i[k] for k in cases.NAMES[:5]]
    whole = ssd(*args, D=i["D"], chunk_size=4, initial_state=i["initial_state"])

    step, state, ys = jax.jit(ssd_step), i["initial_state"], []
    for t in range(11):
        token = [i[k][:, t] for k in ("x", "dt")]
        maps = [i[k][:, t] for k in "BC"]
        y, state = step(*token, i["A"], *maps, D=i["D"], state=state)
        ys.append(y)

    assert cases.relative_error(jnp.stack(ys, 1), whole.y) < 1e-6
    assert cases.relative_error(state, whole.final_state) < 1e-6


def test_checkpoint_and_jit_change_nothing():
    shape = (1, 20, 2, 4, 1, 8)
    inputs = cases.cast(cases.make_inputs(shape), np.float32)
    args = [inputs[k] for k in cases.NAMES[:5]]

    def loss(*args):
        return (ssd(*args, chunk_size=8).y ** 2).sum()

    every = tuple(range(5))
    plain = jax.jit(jax.grad(loss, every))(*args)
    remat = jax.jit(jax.grad(jax.checkpoint(loss), every))(*args)

    for a, b in zip(plain, remat, strict=True):
        assert cases.relative_error(a, b) < 1e-6


@settings(deadline=None, max_examples=12)
@given(
    case=st.sampled_from([((2, 29, 4, 3, 2, 16), 8), ((2, 37, 4, 6, 4, 1), 64)]),
    largest_dt=st.sampled_from([1e-4, 0.1, 10.0]),
    seed=st.integers(0, 1000),
)
def test_any_values_equal_the_recurrence(case, largest_dt, seed):
    shape, chunk_size = case
    inputs = cases.make_inputs(shape, seed, dt=(0, largest_dt))
    inputs = cases.cast(inputs, np.float32)
    cotangents = cases.make_cotangents(shape, seed)

    got = cases.chunked(inputs, cotangents, None, chunk_size)
    want = cases.truth(inputs, cotangents)

    cases.assert_close(got, want, {"all": 5e-6, "dA": 1e-5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": np.ones((1, 4, 3))}, r"ssd: dt: got shape \(1, 4, 3\); expected"),
        ({"A": np.ones(3)}, "ssd: A: got shape"),
        ({"C": np.ones((1, 4, 1, 8))}, "ssd: C: got shape"),
        ({"B": np.ones((1, 4, 3, 8)), "C": np.ones((1, 4, 3, 8))}, "3 groups for 4"),
        ({"D": np.ones(3)}, "ssd: D: got shape"),
        ({"segment_ids": np.ones((1, 4))}, "ssd: segment_ids: got dtype"),
        ({"segment_ids": np.ones((1, 5), np.int32)}, "ssd: segment_ids: got shape"),
        ({"initial_state": np.ones((1, 4, 3, 1))}, "ssd: initial_state: got shape"),
        ({"x": np.ones((1, 4, 4, 3), np.int32)}, "ssd: x: got dtype int32"),
        ({"x": np.ones((1, 0, 4, 3))}, "ssd: x: got shape"),
        ({"dt": jnp.ones((1, 4, 4), jnp.bfloat16)}, "ssd: dt: got dtype bfloat16"),
        ({"chunk_size": 0}, "ssd: chunk_size: got 0"),
        ({"chunk_size": 64.5}, r"ssd: chunk_size: got 64\.5; expected a whole"),
        ({"chunk_size": "64"}, "ssd: chunk_size: got '64'; expected a whole"),
        ({"A": [1.0]}, "ssd: A: got a list; expected an array"),
        ({"implementation": "triton"}, "ssd: implementation: got 'triton'"),
    ],
)
def test_mistakes_are_named(change, message):
    shape = (1, 4, 4, 3, 2, 8)
    inputs = cases.cast(cases.make_inputs(shape), np.float32)
    change = {
        k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in change.items()
    }
    with pytest.raises(ValueError, match=message):
        ssd(**{**inputs, "chunk_size": 4, **change})


@pytest.mark.parametrize(
    ("capability", "n", "dtypes", "refused"),
    [
        ((12, 0), 128, "float32 float32", True),
        ((12, 0), 128, "bfloat16 float32", True),
        ((12, 0), 128, "bfloat16 bfloat16", False),
        ((12, 0), 112, "float32 float32", False),
        ((8, 6), 128, "float32 float32", False),
        ((9, 0), 128, "float32 float32", False),
        (None, 128, "float32 float32", False),
    ],
)
def test_what_the_shared_memory_of_sm_120_has_no_room_for_is_named(
    monkeypatch, capability, n, dtypes, refused
):
    monkeypatch.setattr(backend, "capability", lambda: capability)
    of_x, of_maps = dtypes.split()
    wide = jnp.zeros((1, 1, 1, n))
    maps = wide.astype(of_maps)

    said = refusals.refusal(wide.astype(of_x), wide, wide, maps, maps, wide)

    expected = f"got d_state {n} with float32 operands; expected at most 112"
    assert (expected in (said or "")) == refused
    assert (said is None) != refused


def test_pallas_says_what_is_missing():
    inputs = cases.cast(cases.make_inputs((1, 4, 4, 3, 2, 136)), np.float32)
    missing = "B: got d_state 136; expected at most 128|needs JAX 0.11"
    with pytest.raises(NotImplementedError, match=f"got 'pallas'; .*({missing})"):
        ssd(**inputs, chunk_size=4, implementation="pallas")


@pytest.mark.parametrize("name", SHAPES)
def test_named_sizes_trace_forward_and_backward(name):
    s = SHAPES[name]
    tokens = (s.batch, s.length)
    maps = jax.ShapeDtypeStruct((*tokens, s.n_groups, s.d_state), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((*tokens, s.n_heads, s.headdim), jnp.bfloat16)
    dt = jax.ShapeDtypeStruct((*tokens, s.n_heads), jnp.float32)
    A = jax.ShapeDtypeStruct((s.n_heads,), jnp.float32)

    def run(*args):
        out, pullback = jax.vjp(lambda *a: ssd(*a, chunk_size=s.chunk_size), *args)
        return out, pullback(out)

    out, grads = jax.eval_shape(run, x, dt, A, maps, maps)

    assert out.y == x
    assert out.final_state.shape == (s.batch, s.n_heads, s.headdim, s.d_state)
    assert grads == (x, dt, A, maps, maps)
