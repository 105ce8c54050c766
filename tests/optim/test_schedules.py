"""The rate of every update in closed form, as a function of its number only."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.config import OptimConfig
from bitmamba.optim import make_optimizer, make_schedule


def rates(steps, **settings):
    schedule = make_schedule(OptimConfig(lr=2.0, **settings), steps=steps)
    return np.asarray([schedule(count) for count in range(steps)])


def test_warm_up_reaches_the_rate_at_its_last_update():
    got = rates(8, schedule="constant", warmup_steps=4)

    np.testing.assert_allclose(got, [0.5, 1, 1.5, 2, 2, 2, 2, 2], rtol=1e-6)


def test_no_warm_up_starts_at_the_rate():
    np.testing.assert_allclose(rates(3, schedule="constant", warmup_steps=0), 2.0)


def test_linear_ends_at_its_final_share():
    got = rates(6, schedule="linear", warmup_steps=2, final_lr_share=0.2)

    np.testing.assert_allclose(got, [1, 2, 1.6, 1.2, 0.8, 0.4], rtol=1e-6)


def test_cosine_ends_at_its_final_share():
    got = rates(6, schedule="cosine", warmup_steps=2, final_lr_share=0.1)

    falling = [0.2 + 0.9 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(got, [1, 2, *falling], rtol=1e-6)


def test_wsd_falls_over_the_last_share_only():
    got = rates(10, schedule="wsd", warmup_steps=1, decay_share=0.4, final_lr_share=0.0)

    np.testing.assert_allclose(got, [2] * 6 + [1.5, 1, 0.5, 0], atol=1e-6)


def test_wsd_without_a_share_falls_at_the_last_update():
    got = rates(3, schedule="wsd", warmup_steps=0, decay_share=0.0)

    np.testing.assert_allclose(got, [2, 2, 0.2], rtol=1e-6)


def test_wsd_never_falls_during_the_warm_up():
    got = rates(4, schedule="wsd", warmup_steps=3, decay_share=1.0, final_lr_share=0)

    np.testing.assert_allclose(got, [2 / 3, 4 / 3, 2, 0], atol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_a_run_shorter_than_its_warm_up_is_all_warm_up(schedule):
    got = rates(3, schedule=schedule, warmup_steps=10)

    np.testing.assert_allclose(got, [0.2, 0.4, 0.6], rtol=1e-6)


def test_the_rate_depends_on_the_number_of_updates_only():
    """B051: not on the history; a resumed state goes on where it was."""
    params = {"w": jnp.ones(2)}
    cfg = OptimConfig(name="adamw", schedule="cosine", warmup_steps=4)
    optimizer = make_optimizer(cfg, params, steps=9)
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    reported = []

    for k in range(9):
        if k == 3:  # a resume: the state comes back from plain arrays
            state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
        _, state, report = update({"w": jnp.full(2, 0.1 * k)}, state, params)
        reported.append(float(report["lr"]))

    want = [float(optimizer.schedule(k)) for k in range(9)]
    np.testing.assert_allclose(reported, want, rtol=1e-6)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match=r"optim\.schedule: got 'step'; expected"):
        make_schedule(OptimConfig(schedule="step"), steps=1)
