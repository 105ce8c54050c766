"""The step: exact token weights, untouched state on bad numbers, one step for all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.train.metrics import category_losses, loss_sums, mean_loss, total_sums
from bitmamba.train.state import init_state
from bitmamba.train.step import Pull, TokenLoss, make_train_step
from bitmamba.types import Batch

V = 11


def loss_fn(trainable, frozen, batch, key=None):
    """A one-matrix next-token model; float32 log-softmax."""
    table = trainable["table"] + frozen["table"]
    logits = table[batch.tokens]
    log_p = jax.nn.log_softmax(logits)
    return TokenLoss(-jnp.take_along_axis(log_p, batch.targets[..., None], -1)[..., 0])


def optimizer():
    transform = optax.adam(1e-2)

    def update(grads, state, params):
        updates, state = transform.update(grads, state, params)
        return updates, state, {"grad_norm": optax.tree.norm(grads)}

    return transform.init, update


def make_batch(m, b, length=16, seed=0, weights=None):
    rng = np.random.default_rng(seed)
    shape = (m, b, length)
    w = rng.integers(0, 2, shape) if weights is None else weights
    return Batch(
        tokens=rng.integers(0, V, shape).astype(np.int32),
        targets=rng.integers(0, V, shape).astype(np.int32),
        loss_weights=np.asarray(w, np.float32).reshape(shape),
        segment_ids=np.ones(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        source_ids=rng.integers(0, 3, shape).astype(np.int32),
    )


def start(seed=0):
    init, update = optimizer()
    table = jax.random.normal(jax.random.key(seed), (V, V))
    trainable = {"table": table}
    return init_state(trainable, init(trainable)), {"table": jnp.zeros((V, V))}, update


def run(batches):
    state, frozen, update = start()
    step = jax.jit(make_train_step(loss_fn, update, n_categories=3))
    for batch in batches:
        state, metrics = step(state, frozen, batch)
    return state, metrics


def test_accumulation_equals_the_joint_batch_with_unlike_token_counts():
    # B075, B078: micro-batches of 3 and 30 trainable tokens weigh by token.
    weights = np.zeros((2, 2, 16))
    weights[0, 0, :3] = 1
    weights[1, :, 1:16] = 1
    split = [make_batch(2, 2, seed=s, weights=weights) for s in range(20)]
    joint = [jax.tree.map(lambda x: x.reshape(1, 4, 16), b) for b in split]

    a, metrics_a = run(split)
    b, metrics_b = run(joint)

    np.testing.assert_allclose(
        a.trainable["table"], b.trainable["table"], rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(metrics_a["loss"], metrics_b["loss"], rtol=1e-6)
    assert int(a.step) == 20


def test_the_loss_is_the_mean_over_trainable_tokens_only():
    batch = make_batch(1, 4)
    state, frozen, _ = start()
    nll = np.asarray(loss_fn(state.trainable, frozen, batch).nll, np.float64)

    _, metrics = run([batch])

    want = (nll * batch.loss_weights).sum() / batch.loss_weights.sum()
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    assert want != pytest.approx(nll.mean(), rel=1e-3)


def test_per_category_losses_sum_to_the_loss():
    batch = make_batch(2, 4)
    state, frozen, _ = start()
    nll = np.asarray(loss_fn(state.trainable, frozen, batch).nll, np.float64)

    _, metrics = run([batch])

    sums = total_sums([metrics["sums"]], 3)
    got = category_losses(sums, ("a", "b", "c"))
    for i, name in enumerate(("a", "b", "c")):
        w = batch.loss_weights * (batch.source_ids == i)
        np.testing.assert_allclose(got[name], (nll * w).sum() / w.sum(), rtol=1e-6)
    np.testing.assert_allclose(mean_loss(sums), metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_changes_nothing_and_is_counted(bad):
    state, frozen, update = start()
    step = jax.jit(make_train_step(loss_fn, update, n_categories=3))
    state, _ = step(state, frozen, make_batch(1, 2))
    before = jax.tree.map(np.asarray, state)
    poisoned = {"table": frozen["table"].at[3, 3].set(bad)}

    state, metrics = step(state, poisoned, make_batch(1, 4))

    assert not metrics["is_good"]
    assert not metrics["leaf_is_finite"].all()
    assert not np.isfinite(metrics["loss"])
    assert (int(state.bad_in_row), int(state.bad_total)) == (1, 1)
    for old, new in zip(
        jax.tree.leaves((before.trainable, before.opt_state)),
        jax.tree.leaves((state.trainable, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)

    state, metrics = step(state, frozen, make_batch(1, 4))

    assert metrics["is_good"]
    assert (int(state.bad_in_row), int(state.bad_total)) == (0, 1)


def test_a_batch_without_trainable_tokens_moves_nothing_and_is_finite():
    # B016, B081: a mean over nothing is not NaN in the gradient.
    _, metrics = run([make_batch(1, 2, weights=np.zeros((1, 2, 16)))])

    assert metrics["is_good"]
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["report"]["grad_norm"]) == 0.0


def test_nan_at_a_token_of_weight_zero_is_not_counted():
    batch = jax.tree.map(lambda x: x[0], make_batch(1, 1, weights=np.zeros(16)))
    weights = batch.loss_weights.copy()
    weights[0, 2] = 1
    nll = np.full((1, 16), np.nan, np.float32)
    nll[0, 2] = 1.5

    sums = loss_sums(jnp.asarray(nll), batch._replace(loss_weights=weights), 3)

    assert mean_loss(sums) == 1.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_pull_by_a_divergence_that_is_not_finite_is_skipped(bad):
    state, frozen, update = start()
    before = jax.tree.map(np.array, state.trainable)
    batch = make_batch(1, 2)

    def with_divergence(value):
        def loss(trainable, frozen, batch, key):
            nll = loss_fn(trainable, frozen, batch).nll
            return TokenLoss(nll, jnp.full_like(nll, value))

        pull = Pull(0.25, lambda frozen: frozen)
        return make_train_step(loss, update, n_categories=3, pull=pull)

    skipped, metrics = jax.jit(with_divergence(bad))(state, frozen, batch)
    pulled, _ = jax.jit(with_divergence(1.0))(state, frozen, batch)
    plain, _ = jax.jit(make_train_step(loss_fn, update, n_categories=3))(
        state, frozen, batch
    )

    assert not metrics["is_good"]
    assert np.array_equal(skipped.trainable["table"], before["table"])
    # 0.25 · (1 + 1) of the way from the updated table back to the start, all zeros.
    np.testing.assert_allclose(
        pulled.trainable["table"], 0.5 * plain.trainable["table"], rtol=1e-6
    )
