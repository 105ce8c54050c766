"""Chunked cross-entropy against float64 log-softmax: values, gradients, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.losses import cross_entropy


def reference(hidden, head, targets):
    """-log softmax in numpy float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(-1))
    return log_sum - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def reference_gradients(hidden, head, targets, cotangent):
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logits = hidden @ head
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    d_logits = (p - np.eye(head.shape[1])[targets]) * cotangent[..., None]
    d_head = np.einsum("bld,blv->dv", hidden, d_logits)
    return d_logits @ head.T, d_head


def inputs(vocab_size, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(vocab_size)
    hidden = (scale * rng.standard_normal((2, 9, 16))).astype(dtype)
    head = rng.standard_normal((16, vocab_size)).astype(dtype)
    targets = rng.integers(0, vocab_size, (2, 9)).astype(np.int32)
    targets[0, :2] = 0, vocab_size - 1
    return hidden, head, targets


@pytest.mark.parametrize("block_size", [1, 7, 10, 32, 37, 1000, None])
def test_value_and_gradients_for_every_block_size(block_size):
    hidden, head, targets = inputs(37)
    cotangent = np.random.default_rng(1).standard_normal(targets.shape)

    def loss(h, w):
        nll = cross_entropy(h, w, targets, block_size=block_size)
        return (nll * cotangent).sum(), nll

    grads, nll = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)

    np.testing.assert_allclose(nll, reference(hidden, head, targets), rtol=2e-6)
    expected = reference_gradients(hidden, head, targets, cotangent)
    for got, want in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_extreme_logits_stay_finite_and_right(scale):
    hidden, head, targets = inputs(50, scale=scale)

    def loss(h, w):
        nll = cross_entropy(h, w, targets, block_size=16)
        return nll.sum(), nll

    grads, nll = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)

    np.testing.assert_allclose(nll, reference(hidden, head, targets), rtol=2e-6)
    expected = reference_gradients(hidden, head, targets, np.ones(targets.shape))
    for got, want in zip(grads, expected, strict=True):
        assert np.isfinite(got).all()
        scale_of = np.abs(want).max()
        np.testing.assert_allclose(got, want, atol=1e-5 * scale_of)


def test_bfloat16_inputs_accumulate_in_float32():
    hidden, head, targets = (jnp.asarray(a) for a in inputs(64))
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)

    def loss(h, w):
        nll = cross_entropy(h, w, targets, block_size=24)
        return nll.sum(), nll

    grads, nll = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)

    assert nll.dtype == jnp.float32
    as32 = [np.asarray(a, np.float32) for a in (hidden, head)]
    np.testing.assert_allclose(nll, reference(*as32, np.asarray(targets)), rtol=1e-5)
    expected = reference_gradients(*as32, np.asarray(targets), np.ones(targets.shape))
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        # Two bfloat16 roundings (d_logits and the result), 2**-9 each.
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error <= 2**-8 * np.abs(want).max()


def test_all_logits_never_exist_whole(users_level):
    tokens, vocab_size = 64, 4096
    hidden = jax.ShapeDtypeStruct((tokens, 8), jnp.float32)
    head = jax.ShapeDtypeStruct((8, vocab_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(h, w, t):
        return cross_entropy(h, w, t, block_size=256).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    lowered = step.lower(hidden, head, targets)
    text = lowered.compile(compiler_options=users_level).as_text()

    assert f"f32[{tokens},256]" in text
    assert f"f32[{tokens},{vocab_size}]" not in text


@pytest.mark.parametrize(
    ("targets", "block_size", "message"),
    [(np.zeros((2, 8), np.int32), None, "targets"), (None, 0, "block_size 0")],
)
def test_wrong_shapes_are_refused(targets, block_size, message):
    hidden, head, good = inputs(37)

    with pytest.raises(ValueError, match=message):
        cross_entropy(
            hidden, head, good if targets is None else targets, block_size=block_size
        )


@pytest.mark.parametrize("block_size", [None, 10])
def test_a_frozen_head_of_codes_gives_the_gradient_of_its_float_values(block_size):
    hidden, head, targets = inputs(37)
    codes = np.clip(np.round(2 * head), -1, 1).astype(np.int8)

    def gradient(head):
        def loss(hidden):
            return cross_entropy(hidden, head, targets, block_size=block_size).sum()

        return jax.jit(jax.value_and_grad(loss))(hidden)

    for got, expected in zip(
        gradient(codes), gradient(codes.astype(np.float32)), strict=True
    ):
        assert np.array_equal(got, expected)
