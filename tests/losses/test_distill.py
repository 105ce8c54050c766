"""Distillation from stored top-k logits against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.losses import distillation

V, K = 37, 6
COTANGENT = np.random.default_rng(1).standard_normal((2, 9))


def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def reference(hidden, head, ids, logits, temperature, support):
    """Values and gradients to hidden and head, for COTANGENT, in float64."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    kl, d_logits = np.zeros((2, 9)), np.zeros((2, 9, head.shape[1]))
    for at in np.ndindex(2, 9):
        real = np.isfinite(logits[at])
        if not real.any():
            continue
        known = ids[at][real]
        p = softmax(np.float64(logits[at][real]) / temperature)
        student = hidden[at] @ head / temperature
        kept = known if support == "top_k" else np.arange(head.shape[1])
        q = np.zeros(head.shape[1])
        q[kept] = softmax(student[kept])
        kl[at] = temperature**2 * (p * np.log(p / q[known])).sum()
        d_logits[at] = temperature * q
        d_logits[at][known] -= temperature * p
    d_logits *= COTANGENT[..., None]
    d_head = np.einsum("bld,blv->dv", hidden, d_logits)
    return kl, d_logits @ head.T, d_head


def case(dtype=np.float32):
    """Features, and stored entries of which some are padding and one row has none."""
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.standard_normal((2, 9, 16)), dtype)
    head = jnp.asarray(rng.standard_normal((16, V)) / 4, dtype)
    ids = rng.permuted(np.tile(np.arange(V), (2, 9, 1)), axis=-1)[..., :K]
    logits = rng.standard_normal((2, 9, K)).astype(np.float32)
    ids, padded = ids.astype(np.int32), (slice(None), slice(3, 6), slice(4, None))
    logits[padded], ids[padded] = -np.inf, ids[:, 3:6, :2]  # the id of a real entry
    logits[1, 8] = -np.inf
    return hidden, head, ids, logits


def value_and_gradients(hidden, head, ids, logits, **choices):
    def total(hidden, head):
        values = distillation(hidden, head, ids, logits, **choices)
        return (values * COTANGENT.astype(values.dtype)).sum(), values

    both = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    (d_hidden, d_head), values = both(hidden, head)
    return values, d_hidden, d_head


def test_one_token_by_hand():
    # Student: log(1, 2, 3, 2), so q = (1, 2, 3, 2)/8. Teacher: p = (1/4, 3/4) on 0, 2.
    hidden, head = np.float32([[1.0]]), np.log(np.float32([[1, 2, 3, 2]]))
    ids, logits = np.int32([[2, 0]]), np.log(np.float32([[3, 1]]))

    @jax.jit
    def values(head):
        whole, d_head = jax.value_and_grad(
            lambda w: distillation(hidden, w, ids, logits)[0]
        )(head)
        within = distillation(hidden, head, ids, logits, support="top_k")
        return whole, within, d_head

    whole, within, d_head = values(head)

    np.testing.assert_allclose(whole, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(within, [0], atol=1e-12)  # 1 : 3 for both
    np.testing.assert_allclose(d_head, [[-1 / 8, 1 / 4, -3 / 8, 1 / 4]], atol=1e-7)


@pytest.mark.parametrize(
    ("support", "temperature", "block_size", "dtype"),
    [
        ("vocabulary", 1.0, 4, np.float32),
        ("vocabulary", 2.5, None, np.float64),
        ("top_k", 0.5, 2, np.float32),
        ("top_k", 1.0, 9, np.float64),
    ],
)
def test_value_and_gradients(support, temperature, block_size, dtype):
    choices = {"support": support, "temperature": temperature}

    with jax.enable_x64(dtype == np.float64):
        inputs = case(dtype)
        got = value_and_gradients(*inputs, block_size=block_size, **choices)

    tolerance = 1e-12 if dtype == np.float64 else 3e-6
    for value, want in zip(got, reference(*inputs, **choices), strict=True):
        assert value.dtype == dtype
        np.testing.assert_allclose(value, want, rtol=tolerance, atol=tolerance)
    kl, d_hidden, _ = map(np.asarray, got)
    assert kl[1, 8] == 0
    assert not d_hidden[1, 8].any()


def test_bfloat16_features_accumulate_in_float32():
    inputs = case(jnp.bfloat16)

    kl, *grads = value_and_gradients(*inputs, block_size=4)

    want, *expected = reference(*inputs, 1.0, "vocabulary")
    assert kl.dtype == jnp.float32
    np.testing.assert_allclose(kl, want, rtol=1e-5)
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        # Two bfloat16 roundings (d_logits and the result), 2**-9 each.
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error <= 2**-8 * np.abs(want).max()


def test_extreme_logits_stay_finite_and_the_teacher_gets_no_gradient():
    hidden, head, ids, logits = case()

    @jax.jit
    def all_gradients(hidden, head, logits):
        def total(hidden, head, logits):
            return distillation(hidden, head, ids, logits, block_size=4).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(hidden, head, logits)

    for scale in (1e-6, 1e4, 1e30):
        got = all_gradients(hidden * scale, head, logits * scale)
        value, (d_hidden, d_head, d_teacher) = jax.tree.map(np.asarray, got)

        assert np.isfinite(value)
        assert value > scale
        for gradient in (d_hidden, d_head):
            assert np.isfinite(gradient).all()
            assert gradient.any()
        assert not d_teacher.any()


def test_a_student_like_its_teacher_gets_no_gradient_within_the_stored_entries():
    hidden, head, ids, stored = case()
    logits = np.take_along_axis(np.asarray(hidden) @ np.asarray(head), ids, -1)
    logits = np.where(np.isfinite(stored), logits, -np.inf)

    within = value_and_gradients(hidden, head, ids, logits, support="top_k")

    for value in within:
        np.testing.assert_allclose(value, 0, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, "distillation: temperature: got 0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"support": "k"}, "distillation: support: got 'k'"),
        ({"block_size": 0}, "distillation: block_size: got 0"),
        ({"teacher_logits": np.zeros((2, 9, 5))}, r"teacher_logits \(2, 9, 5\)"),
        ({"head": np.zeros((17, V))}, r"distillation: got hidden.*17, 37"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    names = ("hidden", "head", "teacher_ids", "teacher_logits")
    arguments = {**dict(zip(names, case(), strict=True)), **changes}

    with pytest.raises(ValueError, match=message):
        distillation(**arguments)
