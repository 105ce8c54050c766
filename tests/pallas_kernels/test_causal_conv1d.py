"""The causal convolution against a numpy loop and its own gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import causal_conv1d, causal_conv1d_step, compat

jitted = jax.jit(causal_conv1d, static_argnames="activation")


def make_inputs(b, length, channels, taps, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((b, length, channels), (taps, channels), (channels,))
    arrays = [rng.normal(size=s) for s in shapes]
    return (*arrays, rng.normal(size=(b, taps - 1, channels)))


def loop(x, weight, bias, state, ids, activation):
    """(y, final state), token by token, in float64."""
    y, window = np.zeros(x.shape), state.copy()
    for t in range(x.shape[1]):
        if t and ids is not None:
            window[ids[:, t] != ids[:, t - 1]] = 0
        full = np.concatenate([window, x[:, t : t + 1]], 1)
        total = (full * weight).sum(1) + bias
        y[:, t] = total / (1 + np.exp(-total)) if activation else total
        window = full[:, 1:]
    return y, window


def relative_error(got, want):
    return np.abs(np.float64(got) - want).max() / np.abs(want).max()


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.sets(st.integers(1, 11)),
    taps=st.sampled_from([1, 4]),
    packed=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    seed=st.integers(0, 1000),
)
def test_equals_the_loop(cuts, taps, packed, activation, seed):
    x, weight, bias, state = make_inputs(1, 12, 3, taps, seed)
    ids = np.cumsum([[t in cuts for t in range(12)]], 1, np.int32) if packed else None

    want = loop(x, weight, bias, state, ids, activation)
    got = jitted(
        *(jnp.asarray(t, jnp.float32) for t in (x, weight, bias)),
        segment_ids=ids,
        initial_state=jnp.asarray(state, jnp.float32),
        activation=activation,
    )

    np.testing.assert_allclose(got.y, want[0], rtol=1e-5, atol=3e-6)
    np.testing.assert_array_equal(got.final_state, want[1].astype(np.float32))


def test_bfloat16_is_rounded_once():
    x, weight, bias, state = make_inputs(2, 20, 3, 4)
    x, weight, bias, state = (
        jnp.asarray(t, jnp.bfloat16) for t in (x, weight, bias, state)
    )

    got = causal_conv1d(x, weight, bias, initial_state=state, activation="silu")
    wide = [np.float64(t) for t in (x, weight, bias, state)]
    want = loop(*wide, None, "silu")

    assert got.y.dtype == got.final_state.dtype == jnp.bfloat16
    assert relative_error(got.y, want[0]) < 2**-8
    np.testing.assert_array_equal(np.float64(got.final_state), want[1])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_differences_in_float64(activation, packed):
    arrays = make_inputs(2, 9, 3, 4)
    ids = np.array([[0, 0, 0, 1, 2, 2, 2, 2, 2]] * 2, np.int32) if packed else None
    rng = np.random.default_rng(7)
    wy, ws = rng.normal(size=(2, 9, 3)), rng.normal(size=(2, 3, 3))

    def loss(x, weight, bias, state):
        y, final = loop(x, weight, bias, state, ids, activation)
        return (y * wy).sum() + (final * ws).sum()

    def jax_loss(x, weight, bias, state):
        y, final = causal_conv1d(
            x, weight, bias, segment_ids=ids, initial_state=state, activation=activation
        )
        return (y * wy).sum() + (final * ws).sum()

    with jax.enable_x64(True):
        wide = [jnp.asarray(t) for t in arrays]
        ids = None if ids is None else jnp.asarray(ids)
        got = [np.asarray(g) for g in jax.jit(jax.grad(jax_loss, range(4)))(*wide)]
    ids = None if ids is None else np.asarray(ids)

    for k, grad in enumerate(got):
        want = np.zeros_like(grad)
        for index in np.ndindex(grad.shape):
            step = np.zeros_like(grad)
            step[index] = 1e-5
            up, down = (
                loss(*arrays[:k], arrays[k] + s * step, *arrays[k + 1 :])
                for s in (1, -1)
            )
            want[index] = (up - down) / 2e-5
        assert grad.dtype == np.float64
        np.testing.assert_allclose(grad, want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_case_b028_a_changed_document_moves_no_bit_of_the_others(
    dtype, scale, users_level
):
    x, weight, bias, _ = make_inputs(1, 12, 3, 4)
    ids = jnp.asarray([[0] * 6 + [1] + [2] * 5], jnp.int32)
    chosen = np.arange(12) < 6
    changed = np.where(chosen[None, :, None], scale * x[:, ::-1], x)
    dy = np.random.default_rng(5).normal(size=x.shape)
    changed_dy = np.where(chosen[None, :, None], scale * dy[:, ::-1], dy)

    weight, bias = (jnp.asarray(t, dtype) for t in (weight, bias))

    def both(x, dy):
        def conv(x):
            return causal_conv1d(x, weight, bias, segment_ids=ids, activation="silu").y

        y, pullback = jax.vjp(conv, jnp.asarray(x, dtype))
        return y, pullback(jnp.asarray(dy, dtype))[0]

    run = jax.jit(both, compiler_options=users_level)
    before, after = run(x, dy), run(changed, changed_dy)

    for a, b in zip(before, after, strict=True):
        a, b = np.float32(a)[0], np.float32(b)[0]
        assert np.isfinite(a[~chosen]).all()
        np.testing.assert_array_equal(a[~chosen], b[~chosen])
        assert (a[chosen] != b[chosen]).any()


@pytest.mark.parametrize("length", [1, 2, 11])
def test_steps_and_pieces_equal_the_whole(length):
    arrays = make_inputs(2, length, 3, 4)
    x, weight, bias, state = (jnp.asarray(t, jnp.float32) for t in arrays)
    whole = causal_conv1d(x, weight, bias, initial_state=state, activation="silu")

    carried, ys = state, []
    for t in range(length):
        y, carried = causal_conv1d_step(
            x[:, t], weight, bias, state=carried, activation="silu"
        )
        ys.append(y)

    np.testing.assert_allclose(jnp.stack(ys, 1), whole.y, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(carried, whole.final_state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.ones((4, 2))}, "causal_conv1d: weight: got shape"),
        ({"bias": np.ones(2)}, "causal_conv1d: bias: got shape"),
        ({"initial_state": np.ones((1, 4, 3))}, "causal_conv1d: initial_state: got"),
        ({"segment_ids": np.ones((1, 4), np.int32)}, "causal_conv1d: segment_ids"),
        ({"segment_ids": np.ones((1, 5))}, "causal_conv1d: segment_ids: got dtype"),
        ({"x": np.ones((1, 5, 3), np.int32)}, "causal_conv1d: x: got dtype"),
        ({"activation": "relu"}, "causal_conv1d: activation: got 'relu'"),
        ({"implementation": "cuda"}, "causal_conv1d: implementation: got 'cuda'"),
    ],
)
def test_mistakes_are_named(change, message):
    x, weight, bias, state = make_inputs(1, 5, 3, 4)
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
    given = {
        k: v if isinstance(v, str) else jnp.asarray(v)
        for k, v in (given | change).items()
    }
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**given)


def test_pallas_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(compat, "HAS_MOSAIC_GPU", False)
    x, weight, _, _ = (jnp.asarray(t) for t in make_inputs(1, 5, 3, 4))
    with pytest.raises(NotImplementedError, match=r"causal_conv1d: .* JAX 0\.11"):
        causal_conv1d(x, weight, implementation="pallas")


def test_a_frozen_weight_does_not_make_each_tap_compute_the_activation(users_level):
    """What all taps send back is one array in memory, not a part of each tap's sum.

    XLA:CPU fused it into all four otherwise, at 13 times the time (L 1024, C 1280).
    """
    length, channels = 1024, 64
    shapes = [(1, length, channels), (4, channels), (channels,)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(x, weight, bias, ids):
        y, _ = causal_conv1d(x, weight, bias, segment_ids=ids, activation="silu")
        return (y * y).sum()

    lowered = jax.jit(jax.grad(loss)).lower(*shapes, ids)
    memory = lowered.compile(compiler_options=users_level).memory_analysis()

    # The forward pass's result is the other one.
    assert memory.temp_size_in_bytes >= 2 * 4 * length * channels
