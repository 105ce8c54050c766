"""Target-masked KL against fractions by hand, float64 numpy and float64 autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.losses import tmkl, tmkl_loss_and_gradient, tmkl_topk

DIRECTIONS = ("forward", "reverse")
LOWEST = -1e30


def log_softmax(logits):
    with np.errstate(divide="ignore"):
        shifted = logits - logits.max()
        return np.maximum(shifted - np.log(np.exp(shifted).sum()), LOWEST)


def reference_row(base, adapted, target, direction):
    """KL and gradient of one token in float64, on the entries beside the target."""
    base, adapted = np.asarray(base, np.float64), np.asarray(adapted, np.float64)
    gradient = np.zeros(base.size)
    rest = np.arange(base.size) != target
    if base[rest].max() == -np.inf or adapted[rest].max() == -np.inf:
        return 0.0, gradient
    log_p, log_q = log_softmax(base[rest]), log_softmax(adapted[rest])
    p, q = np.exp(log_p), np.exp(log_q)
    if direction == "forward":
        kl = (p * (log_p - log_q)).sum()
        gradient[rest] = q - p
    else:
        kl = (q * (log_q - log_p)).sum()
        # q_v sum_u q_u (r_v - r_u), r = log q/p: no difference of large means.
        ratio = log_q - log_p
        gradient[rest] = q * ((ratio[:, None] - ratio) @ q)
    return kl, gradient


def reference(base, adapted, targets, direction):
    rows = [
        reference_row(b, a, t, direction)
        for b, a, t in zip(base, adapted, targets, strict=True)
    ]
    return np.array([kl for kl, _ in rows]), np.stack([g for _, g in rows])


def logits_case(tokens=12, vocab_size=37, dtype=np.float32):
    rng = np.random.default_rng(tokens + vocab_size)
    base = 3 * rng.standard_normal((tokens, vocab_size))
    adapted = base + rng.standard_normal((tokens, vocab_size))
    targets = rng.integers(0, vocab_size, tokens).astype(np.int32)
    weights = rng.uniform(0, 2, tokens).astype(np.float32)
    return base.astype(dtype), adapted.astype(dtype), targets, weights


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


def features_case(vocab_size=37, dtype=np.float32):
    rng = np.random.default_rng(vocab_size)
    hidden = rng.standard_normal((2, 9, 16))
    head = rng.standard_normal((16, vocab_size)) / 4
    base_hidden = hidden[..., :12] + rng.standard_normal((2, 9, 12)) / 4
    base_head = head[:12] + rng.standard_normal((12, vocab_size)) / 8
    targets = rng.integers(0, vocab_size, (2, 9)).astype(np.int32)
    arrays = (hidden, head, base_hidden, base_head)
    return *(jnp.asarray(a, dtype) for a in arrays), targets


COTANGENT = np.random.default_rng(1).standard_normal((2, 9))


def features_reference(hidden, head, base_logits, targets, direction):
    """Values and gradients to hidden and head, for COTANGENT, in float64."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logits = (hidden @ head).reshape(-1, head.shape[1])
    base = base_logits.reshape(logits.shape)
    kl, d_logits = reference(base, logits, targets.reshape(-1), direction)
    d_logits *= COTANGENT.reshape(-1, 1)
    d_hidden = (d_logits @ head.T).reshape(hidden.shape)
    return kl.reshape(2, 9), d_hidden, hidden.reshape(-1, 16).T @ d_logits


def float64_logits(hidden, head):
    return np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)


def value_and_gradients(loss, hidden, head):
    def total(hidden, head):
        values = loss(hidden, head)
        return (values * COTANGENT.astype(values.dtype)).sum(), values

    both = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    (d_hidden, d_head), values = both(hidden, head)
    return values, d_hidden, d_head


@pytest.mark.parametrize(
    ("direction", "block_size", "dtype"),
    [
        ("forward", 4, np.float32),
        ("forward", None, np.float64),
        ("reverse", 9, np.float32),
        ("reverse", 1, np.float64),
    ],
)
def test_features_value_and_gradients(direction, block_size, dtype):
    with jax.enable_x64(dtype == np.float64):
        hidden, head, base_hidden, base_head, targets = features_case(dtype=dtype)

        got = value_and_gradients(
            lambda h, w: tmkl(
                h,
                w,
                base_hidden,
                base_head,
                targets,
                direction=direction,
                block_size=block_size,
            ),
            hidden,
            head,
        )

    base = float64_logits(base_hidden, base_head)
    expected = features_reference(hidden, head, base, targets, direction)
    for value, want in zip(got, expected, strict=True):
        assert value.dtype == dtype
        tolerance = 1e-12 if dtype == np.float64 else 3e-6
        np.testing.assert_allclose(value, want, rtol=tolerance, atol=tolerance)


def test_features_in_bfloat16_accumulate_in_float32():
    hidden, head, base_hidden, base_head, targets = features_case(dtype=jnp.bfloat16)

    kl, *grads = value_and_gradients(
        lambda h, w: tmkl(h, w, base_hidden, base_head, targets, block_size=4),
        hidden,
        head,
    )

    base = float64_logits(base_hidden, base_head)
    want, *expected = features_reference(hidden, head, base, targets, "forward")
    assert kl.dtype == jnp.float32
    np.testing.assert_allclose(kl, want, rtol=1e-5)
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        # Two bfloat16 roundings (d_logits and the result), 2**-9 each.
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error <= 2**-8 * np.abs(want).max()


def test_base_gets_no_gradient_and_adapters_at_their_start_none_either():
    hidden, head, base_hidden, base_head, targets = features_case()
    base_hidden = jnp.pad(base_hidden, ((0, 0), (0, 0), (0, 4)))
    base_head = jnp.pad(base_head, ((0, 4), (0, 0)))

    @jax.jit
    def all_gradients(*features):
        def total(*features):
            return tmkl(*features, targets, block_size=4).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(*features)

    moved, gradients = all_gradients(hidden, head, base_hidden, base_head)
    at_start, zeros = all_gradients(hidden, head, hidden, head)

    assert moved > 0
    assert [np.asarray(g).any() for g in gradients] == [True, True, False, False]
    assert at_start == 0
    assert not any(np.asarray(g).any() for g in zeros)


def test_one_token_without_an_axis_and_no_tokens():
    hidden, head, base_hidden, base_head, targets = features_case()
    base, adapted, ids, weights = logits_case()

    @jax.jit
    def one_and_none(head):
        def total(head):
            nothing = hidden[0, :0], head, base_hidden[0, :0], base_head, ids[:0]
            return tmkl(*nothing).sum()

        one = hidden[1, 3], head, base_hidden[1, 3], base_head, targets[1, 3]
        return tmkl(*one), jax.value_and_grad(total)(head)

    one, (none, d_head) = one_and_none(head)
    loss, gradient = tmkl_loss_and_gradient(base[0], adapted[0], ids[0], weights[0])

    base_logits = float64_logits(base_hidden, base_head)[1, 3]
    adapted_logits = float64_logits(hidden, head)[1, 3]
    want, _ = reference_row(base_logits, adapted_logits, targets[1, 3], "forward")
    np.testing.assert_allclose(one, want, rtol=1e-5)
    assert none == 0
    assert not np.asarray(d_head).any()
    kl, expected = reference(base[:1], adapted[:1], ids[:1], "forward")
    np.testing.assert_allclose(loss, kl[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[0], atol=1e-6)


def top_k(logits, k):
    """Ids in falling order of their logits, then two of padding with a real id."""
    ids = np.argsort(-logits, -1)[..., :k]
    values = np.take_along_axis(logits, ids, -1)
    ids = np.concatenate([ids, ids[..., :2]], -1).astype(np.int32)
    return ids, np.pad(values, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf)


def test_stored_logits_of_the_whole_vocabulary_are_the_full_tmkl():
    hidden, head, base_hidden, base_head, targets = features_case()
    ids, logits = top_k(np.asarray(base_hidden) @ np.asarray(base_head), 37)

    got = value_and_gradients(
        lambda h, w: tmkl_topk(
            h, w, ids, logits, targets, support="vocabulary", block_size=4
        ),
        hidden,
        head,
    )
    within = jax.jit(tmkl_topk)(hidden, head, ids, logits, targets)

    base = float64_logits(base_hidden, base_head)
    expected = features_reference(hidden, head, base, targets, "forward")
    for value, want in zip((within, *got), (expected[0], *expected), strict=True):
        np.testing.assert_allclose(value, want, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("support", "direction"),
    [("top_k", "forward"), ("top_k", "reverse"), ("vocabulary", "forward")],
)
def test_stored_top_k_logits(support, direction):
    hidden, head, base_hidden, base_head, targets = features_case()
    base = float64_logits(base_hidden, base_head)
    ids, logits = top_k(base, 8)
    targets[0, :5] = ids[0, :5, 3]  # a target among the stored entries, and (mostly)
    targets[1, 0] = np.argmin(base[1, 0])  # one that is not

    got = value_and_gradients(
        lambda h, w: tmkl_topk(
            h, w, ids, logits, targets, support=support, direction=direction
        ),
        hidden,
        head,
    )

    stored = np.full(base.shape, -np.inf)
    np.put_along_axis(stored, ids[..., :8], logits[..., :8], -1)
    adapted = float64_logits(hidden, head)
    kl, d_logits = np.zeros((2, 9)), np.zeros(base.shape)
    for at in np.ndindex(2, 9):
        kept = np.isfinite(stored[at]) if support == "top_k" else np.ones(37, bool)
        target = np.flatnonzero(np.flatnonzero(kept) == targets[at])
        target = target[0] if target.size else -1
        kl[at], d_logits[at][kept] = reference_row(
            stored[at][kept], adapted[at][kept], target, direction
        )
    d_logits *= COTANGENT[..., None]
    head64, hidden64 = np.asarray(head, np.float64), np.asarray(hidden, np.float64)
    d_head = np.einsum("bld,blv->dv", hidden64, d_logits)
    for value, want in zip(got, (kl, d_logits @ head64.T, d_head), strict=True):
        np.testing.assert_allclose(value, want, rtol=3e-6, atol=3e-6)


def test_stored_ids_outside_the_vocabulary_give_nan_unless_padding():
    hidden, head, _, _, targets = features_case()
    ids = np.tile(np.arange(4, dtype=np.int32), (2, 9, 1))
    logits = np.zeros(ids.shape, np.float32)
    ids[0, 1, 2], ids[0, 2, 2] = 37, -1
    ids[0, 3, 2], logits[0, 3, 2] = -1, -np.inf
    logits[0, 4, 2] = np.nan

    kl = jax.jit(tmkl_topk)(hidden, head, ids, logits, targets)

    bad = np.zeros((2, 9), bool)
    bad[0, [1, 2, 4]] = True
    np.testing.assert_array_equal(np.isnan(kl), bad)


def call(function, **changes):
    hidden, head, base_hidden, base_head, targets = features_case()
    ids = np.zeros((2, 9, 3), np.int32)
    arguments = {
        tmkl: (hidden, head, base_hidden, base_head, targets),
        tmkl_topk: (hidden, head, ids, ids.astype(np.float32), targets),
        tmkl_loss_and_gradient: logits_case(),
    }[function]
    arguments = list(arguments)
    for place, value in changes.pop("replace", {}).items():
        arguments[place] = value
    return function(*arguments, **changes)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (tmkl, {"direction": "back"}, "tmkl: direction: got 'back'"),
        (tmkl, {"block_size": 0}, "tmkl: block_size: got 0"),
        (tmkl, {"replace": {1: np.zeros((15, 37))}}, r"tmkl: got hidden.*15, 37"),
        (tmkl, {"replace": {3: np.zeros((12, 36))}}, r"tmkl: got base_hidden.*12, 36"),
        (tmkl, {"replace": {4: np.zeros((2, 8), np.int32)}}, r"tokens \(2, 8\)"),
        (tmkl_topk, {"support": "all"}, "tmkl_topk: support: got 'all'"),
        (
            tmkl_topk,
            {"direction": "reverse", "support": "vocabulary"},
            "infinite outside the stored entries",
        ),
        (tmkl_topk, {"replace": {3: np.zeros((2, 9, 4))}}, r"base_logits \(2, 9, 4\)"),
        (tmkl_loss_and_gradient, {"replace": {3: np.ones(3)}}, r"weights \(3,\)"),
        (tmkl_loss_and_gradient, {"block_size": -1}, "block_size: got -1"),
    ],
)
def test_wrong_arguments_are_refused(function, changes, message):
    with pytest.raises(ValueError, match=message):
        call(function, **dict(changes))
