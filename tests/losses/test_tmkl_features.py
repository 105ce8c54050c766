"""Target-masked KL from features and from stored logits, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kl_reference import logits_case, reference, reference_row

from bitmamba.losses import tmkl, tmkl_loss_and_gradient, tmkl_topk

pytestmark = pytest.mark.newest

DIRECTIONS = ("forward", "reverse")


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
