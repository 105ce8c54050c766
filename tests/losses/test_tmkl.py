"""Target-masked KL of logits: by hand, float64 numpy, float64 autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_reference import LOWEST, logits_case, reference

from bitmamba.losses import tmkl_loss_and_gradient

pytestmark = pytest.mark.newest

DIRECTIONS = ("forward", "reverse")
ln = np.log

# Logits are logarithms of these whole numbers, so that probabilities are fractions.
BY_HAND = {
    3: {
        "base": [[1, 3, 5], [2, 7, 2], [9, 1, 4]],
        "adapted": [[1, 1, 9], [3, 1, 1], [1, 1, 4]],
        "targets": [2, 1, 0],
        # p' = (1/4, 3/4), (1/2, 1/2), (1/5, 4/5); q' = (1/2, 1/2), (3/4, 1/4), p'.
        "forward": [ln(1 / 2) / 4 + ln(3 / 2) * 3 / 4, ln(4 / 3) / 2, 0],
        "d_forward": [[1 / 4, -1 / 4, 0], [1 / 4, 0, -1 / 4], [0, 0, 0]],
        "reverse": [ln(4 / 3) / 2, ln(3 / 2) * 3 / 4 + ln(1 / 2) / 4, 0],
        # q (log q/p - KL); two entries: q1 q2 (log q1/p1 - log q2/p2), and minus it.
        "d_reverse": [
            [ln(3) / 4, -ln(3) / 4, 0],
            [ln(3) * 3 / 16, 0, -ln(3) * 3 / 16],
            [0, 0, 0],
        ],
    },
    4: {
        "base": [[1, 1, 2, 6], [3, 5, 1, 4], [7, 1, 1, 1]],
        "adapted": [[2, 1, 1, 1], [1, 9, 2, 1], [7, 1, 1, 2]],
        "targets": [3, 1, 0],
        # p' = (1/4, 1/4, 1/2), (3/8, 1/8, 1/2), thirds;
        # q' = (1/2, 1/4, 1/4), (1/4, 1/2, 1/4), (1/4, 1/4, 1/2).
        "forward": [
            ln(2) / 4,
            ln(3 / 2) * 3 / 8 + ln(1 / 4) / 8 + ln(2) / 2,
            ln(4 / 3) * 2 / 3 + ln(2 / 3) / 3,
        ],
        "d_forward": [
            [1 / 4, 0, -1 / 4, 0],
            [-1 / 8, 0, 3 / 8, -1 / 4],
            [0, -1 / 12, -1 / 12, 1 / 6],
        ],
        "reverse": [
            ln(2) / 4,
            ln(2 / 3) / 4 + ln(4) / 2 + ln(1 / 2) / 4,
            ln(3 / 4) / 2 + ln(3 / 2) / 2,
        ],
        "d_reverse": [
            [ln(2) * 3 / 8, -ln(2) / 16, -ln(2) * 5 / 16, 0],
            # KL = ln(2) - ln(3)/4; log q/p = ln(2/3), ln(4), ln(1/2).
            [
                (ln(2 / 3) - ln(2) + ln(3) / 4) / 4,
                0,
                (ln(4) - ln(2) + ln(3) / 4) / 2,
                (ln(1 / 2) - ln(2) + ln(3) / 4) / 4,
            ],
            # KL = ln(9/8)/2; log q/p = ln(3/4), ln(3/4), ln(3/2).
            [
                0,
                (ln(3 / 4) - ln(9 / 8) / 2) / 4,
                (ln(3 / 4) - ln(9 / 8) / 2) / 4,
                (ln(3 / 2) - ln(9 / 8) / 2) / 2,
            ],
        ],
    },
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("vocab_size", [3, 4])
def test_three_tokens_by_hand(vocab_size, direction):
    case = BY_HAND[vocab_size]
    base, adapted = ln(case["base"]), ln(case["adapted"])
    targets, weights = np.array(case["targets"], np.int32), np.array([1.0, 2.0, 1.0])

    with jax.enable_x64(True):
        loss, gradient = tmkl_loss_and_gradient(
            base, adapted, targets, weights, direction=direction
        )

    assert loss.dtype == gradient.dtype == np.float64
    share = weights / 4
    np.testing.assert_allclose(loss, (case[direction] * share).sum(), rtol=1e-13)
    expected = np.array(case[f"d_{direction}"]) * share[:, None]
    np.testing.assert_allclose(gradient, expected, atol=1e-15)


@functools.partial(jax.jit, static_argnums=4)
def autodiff(base, adapted, targets, weights, direction):
    def loss(adapted):
        is_target = jnp.arange(base.shape[-1]) == targets[:, None]
        log_p = jax.nn.log_softmax(jnp.where(is_target, LOWEST, base))
        log_q = jax.nn.log_softmax(jnp.where(is_target, LOWEST, adapted))
        if direction == "reverse":
            log_p, log_q = log_q, log_p
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        return (weights * kl).sum() / weights.sum()

    return jax.value_and_grad(loss)(adapted)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equals_autodiff_in_float64(direction):
    case = logits_case(dtype=np.float64)

    with jax.enable_x64(True):
        case = (*case[:3], case[3].astype(np.float64))
        loss, gradient = autodiff(*case, direction)
        got = tmkl_loss_and_gradient(*case, direction=direction, block_size=5)

        np.testing.assert_allclose(got[0], loss, rtol=1e-10)
        np.testing.assert_allclose(got[1], gradient, atol=1e-10)


EXTREME = [-np.inf, -1e30, -1e4, 1e4, -3e38, 3e38]
LOGITS = st.one_of(
    st.floats(-20, 20, width=32), st.sampled_from(EXTREME), st.just(-np.inf)
)
ROWS = st.lists(st.lists(LOGITS, min_size=5, max_size=5), min_size=3, max_size=3)
TARGETS = st.lists(st.integers(0, 4), min_size=3, max_size=3)


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(deadline=None, max_examples=50)
@given(base=ROWS, adapted=ROWS, targets=TARGETS)
def test_any_logits_give_finite_exact_values(direction, base, adapted, targets):
    base, adapted = np.float32(base), np.float32(adapted)
    targets, weights = np.int32(targets), np.float32([1, 0.5, 2])

    loss, gradient = tmkl_loss_and_gradient(
        base, adapted, targets, weights, direction=direction
    )

    # |z - peak| <= 40 is rounded twice, to 2**-24 of itself, in log p and in log q;
    # 1e4 to as much more, which only the reverse gradient has as a factor.
    tolerance = 2e-5
    gradient = np.asarray(gradient, np.float64)
    kl, expected = reference(base, adapted, targets, direction)
    share = np.float64(weights) / weights.sum()
    np.testing.assert_allclose(loss, (kl * share).sum(), rtol=tolerance, atol=tolerance)
    assert loss >= 0
    assert np.isfinite(gradient).all()
    size = np.maximum(1, np.abs(expected).max(-1))[:, None]
    if direction == "reverse":
        far = (np.abs([base, adapted]) == 1e4).any((0, 2))
        size = np.maximum(size, np.where(far, 1e4 / 8, 1)[:, None])
    error = np.abs(gradient - expected * share[:, None])
    assert (error <= tolerance * size).all()
    assert (np.abs(gradient.sum(-1)) <= 1e-6 * size[:, 0]).all()
    assert (np.take_along_axis(gradient, targets[:, None], -1) == 0).all()


def test_what_only_one_model_forbids_counts_as_1e30_and_both_as_nothing():
    inf = np.inf
    base = np.float32([[-inf, 0, 0, 9], [0, -inf, 0, 9], [0, -inf, 0, 9]])
    adapted = np.float32([[0, -inf, 0, 9], [0, -inf, 0, 9], [0, 0, 0, 9]])
    alone = np.float32([[-inf, -inf, -inf, 1]])
    targets, weights = np.int32([3, 3, 3]), np.float32([1, 1, 1])

    one = [
        tmkl_loss_and_gradient(b[None], a[None], targets[:1], weights[:1])
        for b, a in zip(base, adapted, strict=True)
    ]

    # p' = (0, 1/2, 1/2), q' = (1/2, 0, 1/2): the base allows what is now forbidden.
    np.testing.assert_allclose(one[0][0], 0.5e30, rtol=1e-6)
    np.testing.assert_allclose(one[0][1], [[0.5, -0.5, 0, 0]], atol=1e-7)
    assert one[1][0] == 0
    assert not np.asarray(one[1][1]).any()
    # The base forbids what is now allowed: p' log p' is 0 there.
    np.testing.assert_allclose(one[2][0], ln(3 / 2), rtol=1e-6)
    np.testing.assert_allclose(one[2][1], [[-1 / 6, 1 / 3, -1 / 6, 0]], atol=1e-7)
    for b, a in ((alone, base[:1]), (base[:1], alone), (alone, alone)):
        loss, gradient = tmkl_loss_and_gradient(b, a, targets[:1], weights[:1])
        assert loss == 0
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_logits_give_exactly_nothing_and_a_small_shift_keeps_its_digits(
    direction,
):
    base, _, targets, weights = logits_case()
    shift = np.random.default_rng(5).standard_normal(base.shape) * 2.0**-10
    near = (base + shift).astype(np.float32)

    same, gradient = tmkl_loss_and_gradient(
        base, base, targets, weights, direction=direction
    )
    small, _ = tmkl_loss_and_gradient(base, near, targets, weights, direction=direction)

    assert same == 0
    assert not np.asarray(gradient).any()
    kl, _ = reference(base, near, targets, direction)
    expected = (kl * weights).sum() / weights.sum()
    assert expected < 1e-6  # as large as the rounding of log p: 2**-24 * 12
    np.testing.assert_allclose(small, expected, rtol=2e-3)


def test_weight_zero_hides_a_token_and_no_weight_gives_zero():
    base, adapted, targets, weights = logits_case()
    weights[[2, 7]] = 0
    spoilt = adapted.copy()
    spoilt[2], spoilt[7] = np.nan, 50

    clean = tmkl_loss_and_gradient(base, adapted, targets, weights)
    hidden = tmkl_loss_and_gradient(base, spoilt, targets, weights)
    nothing = tmkl_loss_and_gradient(base, spoilt, targets, 0 * weights)
    seen = tmkl_loss_and_gradient(base, spoilt, targets, weights + 1)

    for got, want in zip(hidden, clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert nothing[0] == 0
    assert not np.asarray(nothing[1]).any()
    assert np.isnan(seen[0])  # a bad number is not swallowed


def test_bfloat16_logits_are_compared_in_float32():
    base, adapted, targets, weights = logits_case()
    base, adapted = (jnp.asarray(a, jnp.bfloat16) for a in (base, adapted))

    loss, gradient = tmkl_loss_and_gradient(base, adapted, targets, weights)

    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    share = np.float64(weights) / weights.sum(dtype=np.float64)
    kl, expected = reference(base, adapted, targets, "forward")
    np.testing.assert_allclose(loss, (kl * share).sum(), rtol=2e-6)
    # One rounding to bfloat16: half of 2**-8.
    got = np.asarray(gradient, np.float64)
    np.testing.assert_allclose(got, expected * share[:, None], rtol=2**-8, atol=1e-7)


def test_temporaries_are_those_of_one_block():
    tokens, vocab_size = 256, 512
    shape = jax.ShapeDtypeStruct((tokens, vocab_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens,), jnp.float32)

    step = jax.jit(functools.partial(tmkl_loss_and_gradient, block_size=8))
    compiled = step.lower(shape, shape, targets, weights).compile()

    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < tokens * vocab_size * 4 / 4
