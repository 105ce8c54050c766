"""Bad numbers leave no trace; in a row they lead back, and at last to an end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.config import GuardConfig
from bitmamba.train import guard
from bitmamba.train.guard import GO_ON, ROLL_BACK, STOP, Counts
from bitmamba.train.spike import (
    WINDOW,
    LossHistory,
    SpikeRule,
    no_history,
    remember,
    spike_limit,
)
from bitmamba.train.state import init_state
from bitmamba.train.step import TokenLoss, make_train_step
from bitmamba.types import Batch

pytestmark = pytest.mark.newest

RULE = SpikeRule(sigmas=6.0, rise=0.5)


def history_of(losses):
    history = no_history()
    for loss in losses:
        history = remember(history, jnp.float32(loss), jnp.array(True))
    return history


def test_a_spike_needs_half_a_window_of_good_losses():
    losses = np.linspace(2.0, 3.0, WINDOW // 2)

    too_early = spike_limit(history_of(losses[:-1]), RULE)
    limit = spike_limit(history_of(losses), RULE)

    assert too_early == np.inf
    np.testing.assert_allclose(limit, losses.mean() + 6 * losses.std(), rtol=1e-6)


def test_losses_that_hardly_vary_may_still_rise_by_the_floor():
    limit = spike_limit(history_of([0.01] * WINDOW), RULE)

    np.testing.assert_allclose(limit, 0.51, rtol=1e-6)


def test_only_the_last_window_counts():
    losses = [50.0] * WINDOW + list(np.linspace(1.0, 2.0, WINDOW))

    limit = spike_limit(history_of(losses), RULE)

    last = np.asarray(losses[-WINDOW:])
    np.testing.assert_allclose(limit, last.mean() + 6 * last.std(), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_leaves_the_history_as_it_was_bit_for_bit(bad):
    before = history_of(np.linspace(2.0, 3.0, 70))

    after = remember(before, jnp.float32(bad), jnp.array(False))

    assert all(map(np.array_equal, before, after))


# A model whose loss is its only weight, times a factor that the batch carries.
def loss_fn(trainable, frozen, batch, key=None):
    factor = batch.tokens.astype(jnp.float32) * frozen
    return TokenLoss(trainable["w"] * factor)


def make_batch(tokens, weights=1.0):
    tokens = np.full((1, 1, 4), tokens, np.int32)
    zeros = np.zeros_like(tokens)
    weights = np.full(tokens.shape, weights, np.float32)
    return Batch(tokens, zeros, weights, zeros + 1, zeros, zeros)


def sgd(scale=1e-3):
    def update(grads, state, params):
        updates = jax.tree.map(lambda g: -scale * g, grads)
        return updates, state + 1, {"update_norm": optax.tree.norm(updates)}

    return update


def start(losses=()):
    state = init_state({"w": jnp.float32(2.0)}, jnp.int32(0))
    return state._replace(history=history_of(losses))


def same_but_counts(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(
            jax.tree.leaves((a.trainable, a.opt_state, a.history)),
            jax.tree.leaves((b.trainable, b.opt_state, b.history)),
            strict=True,
        )
    )


def test_a_spike_is_skipped_and_no_running_figure_takes_it_in():
    step = jax.jit(make_train_step(loss_fn, sgd(), n_categories=1, spike=RULE))
    before = start([2.0] * WINDOW)

    spiked, metrics = step(before, jnp.float32(1.0), make_batch(9))
    good, fine = step(spiked, jnp.float32(1.0), make_batch(1))

    assert same_but_counts(before, spiked)
    assert (int(spiked.bad_in_row), int(good.bad_in_row)) == (1, 0)
    assert int(good.bad_total) == 1
    assert guard.cause(metrics, ["w"]) == "loss 18.0000 is a spike, above 2.5000"
    assert guard.cause(fine, ["w"]) is None
    assert float(good.history.losses[WINDOW % WINDOW]) == 2.0


def test_without_a_rule_a_large_loss_is_trained():
    step = jax.jit(make_train_step(loss_fn, sgd(), n_categories=1))

    after, metrics = step(start([2.0] * WINDOW), jnp.float32(1.0), make_batch(9))

    assert metrics["is_good"]
    assert float(after.trainable["w"]) < 2.0


@pytest.mark.parametrize(
    ("frozen", "update", "cause"),
    [
        (np.nan, sgd(), "gradient of w (1 in all) is not finite"),
        # Finite gradients, but the update is NaN: only the optimiser is at fault.
        (1.0, sgd(np.nan), "with finite gradients the update is not finite"),
        (1e19, sgd(1e25), "with finite gradients the update is not finite"),
    ],
    ids=["gradient", "update nan", "update inf"],
)
def test_a_step_that_is_not_finite_changes_nothing(frozen, update, cause):
    # B062, B067, B071: 0 · NaN reaches neither parameters, moments nor history.
    step = jax.jit(make_train_step(loss_fn, update, n_categories=1, spike=RULE))
    before = start([2.0] * 70)

    after, metrics = step(before, jnp.float32(frozen), make_batch(1))

    assert same_but_counts(before, after)
    assert (int(after.step), int(after.bad_in_row)) == (1, 1)
    assert guard.cause(metrics, ["w"]) == cause


def test_a_batch_without_a_token_to_train_is_no_loss_of_zero():
    step = jax.jit(make_train_step(loss_fn, sgd(), n_categories=1, spike=RULE))

    after, metrics = step(start([2.0]), jnp.float32(1.0), make_batch(1, weights=0.0))

    assert metrics["is_good"]
    assert int(after.history.count) == 1


def test_history_survives_json_to_the_bit():
    rng = np.random.default_rng(0)
    history = history_of(rng.standard_normal(80).astype(np.float32))

    from bitmamba.train.restore import remembered

    kept = remembered(start()._replace(history=history))

    back = LossHistory(jnp.asarray(kept["losses"], jnp.float32), kept["n_losses"])
    assert all(map(np.array_equal, history, back))


@pytest.mark.parametrize(
    ("in_row", "rollbacks", "action"),
    [
        (0, 0, GO_ON),
        (2, 0, GO_ON),
        (3, 0, ROLL_BACK),
        (3, 1, ROLL_BACK),
        (3, 2, STOP),
        (2, 2, GO_ON),
    ],
)
def test_back_after_three_in_a_row_and_an_end_after_two_ways_back(
    in_row, rollbacks, action
):
    counts = Counts(rollbacks, 0.5**rollbacks)

    assert guard.decide(in_row, counts, max_bad_steps=3, cfg=GuardConfig()) == action


def test_each_way_back_cuts_the_learning_rate():
    cfg = dataclasses.replace(GuardConfig(), lr_cut=0.1)

    counts = guard.rolled_back(guard.rolled_back(Counts(), cfg), cfg)

    assert counts.rollbacks == 2
    assert counts.lr_scale == pytest.approx(0.01)
