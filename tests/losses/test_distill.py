"""Distillation from stored top-k logits against float64 numpy."""

import functools

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


@functools.cache
def compiled(temperature, support, block_size):
    """Values and the gradients to hidden, head and the teacher's logits."""

    def total(hidden, head, ids, logits):
        values = distillation(
            hidden,
            head,
            ids,
            logits,
            temperature=temperature,
            support=support,
            block_size=block_size,
        )
        return (values * COTANGENT.astype(values.dtype)).sum(), values

    return jax.jit(jax.grad(total, argnums=(0, 1, 3), has_aux=True))


def value_and_gradients(inputs, choices):
    (d_hidden, d_head, d_teacher), values = compiled(*choices)(*inputs)
    assert not np.asarray(d_teacher).any()
    return [np.asarray(a) for a in (values, d_hidden, d_head)]


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


IN_BLOCKS = (1.0, "vocabulary", 4)
WITHIN = (0.5, "top_k", None)


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        (IN_BLOCKS, np.float32),
        (WITHIN, np.float32),
        ((2.5, "vocabulary", 2), np.float64),
        (IN_BLOCKS, jnp.bfloat16),
    ],
)
def test_value_and_gradients(choices, dtype):
    with jax.enable_x64(dtype == np.float64):
        inputs = case(dtype)
        kl, *grads = value_and_gradients(inputs, choices)

    want, *expected = reference(*inputs, *choices[:2])
    assert kl.dtype == (np.float64 if dtype == np.float64 else np.float32)
    tolerance = 1e-12 if dtype == np.float64 else 3e-6
    np.testing.assert_allclose(kl, want, rtol=tolerance, atol=tolerance)
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == dtype
        error = np.abs(got.astype(np.float64) - want).max()
        # Two bfloat16 roundings (d_logits and the result), 2**-9 each.
        relative = 2**-8 if dtype == jnp.bfloat16 else tolerance
        assert error <= relative * np.abs(want).max()
    assert kl[1, 8] == 0  # no entry stored
    assert not grads[0][1, 8].any()


def test_extreme_logits_stay_finite():
    hidden, head, ids, logits = case()

    for scale in (1e-6, 1e4, 1e30):
        inputs = (hidden * scale, head, ids, logits * scale)
        for value in value_and_gradients(inputs, IN_BLOCKS):
            assert np.isfinite(value).all()
            assert value.any()


def test_a_student_like_its_teacher_gets_no_gradient_within_the_stored_entries():
    hidden, head, ids, stored = case()
    logits = np.take_along_axis(np.asarray(hidden) @ np.asarray(head), ids, -1)
    logits = np.where(np.isfinite(stored), logits, -np.inf)

    for value in value_and_gradients((hidden, head, ids, logits), WITHIN):
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
