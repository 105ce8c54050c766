"""Every figure of the report against numpy, on trees where the answer is plain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.config import AdafactorConfig, OptimConfig, Rule
from bitmamba.optim import make_optimizer
from bitmamba.optim.report import _count

pytestmark = pytest.mark.newest

RULES = (
    Rule(pattern=".*/D", name="state", lr_mult=50.0),
    Rule(pattern=".*/never", name="gone", optional=True),
    Rule(pattern=".*"),
)


def run(params, grads, *, rules=RULES, steps=1, **settings):
    cfg = OptimConfig(schedule="constant", warmup_steps=0, rules=rules, **settings)
    optimizer = make_optimizer(cfg, params, steps=steps)
    return optimizer.update(grads, optimizer.init(params), params)


def test_norms_and_ratio_of_each_group_and_of_all():
    params = {
        "x": {"D": jnp.full(4, 2.0), "w": jnp.full((2, 2), 0.5)},
        "w": jnp.ones(1),
    }
    grads = {
        "x": {"D": jnp.full(4, 1.5), "w": jnp.full((2, 2), 2.0)},
        "w": jnp.zeros(1),
    }

    updates, _, report = run(params, grads, lr=1e-2)

    want = {
        "lr": 1e-2,
        "grad_norm": 5.0,
        "grad_norm_clipped": 1.0,
        "optim/state/lr": 0.5,
        "optim/state/grad_norm": 3.0,
        "optim/state/grad_norm_clipped": 0.6,
        "optim/state/update_norm": 50 * 1e-2 * 2.0 * 2.0,
        "optim/state/update_ratio": 50 * 1e-2,
        "optim/state/lost_share": 0.0,
        "optim/state/eps_floor_share": 0.0,
        "optim/rest/lr": 1e-2,
        "optim/rest/grad_norm": 4.0,
        "optim/rest/grad_norm_clipped": 0.8,
        "optim/rest/update_norm": 1e-2 * 0.5 * 2.0,
        "optim/rest/update_ratio": 1e-2 / np.sqrt(2.0),
        "optim/rest/lost_share": 0.0,
        "optim/rest/eps_floor_share": 0.2,  # the element without a gradient
    }
    assert set(report) == set(want)
    for key, value in want.items():
        np.testing.assert_allclose(report[key], value, rtol=1e-5, err_msg=key)
    assert (updates["w"] == 0).all()


def test_the_inf_norm_is_reported_where_it_is_clipped():
    params = {"x": {"D": jnp.ones(2)}, "w": jnp.ones(2)}
    grads = {"x": {"D": jnp.asarray([3.0, -4.0])}, "w": jnp.asarray([8.0, 1.0])}

    _, _, report = run(params, grads, norm="inf", max_norm=2.0)

    assert float(report["grad_norm"]) == 8.0
    assert float(report["grad_norm_clipped"]) == 2.0
    assert float(report["optim/state/grad_norm"]) == 4.0
    assert float(report["optim/state/grad_norm_clipped"]) == 1.0


def test_clamped_share_counts_the_elements_beyond_the_limit():
    params = {"x": {"D": jnp.ones(4)}, "w": jnp.ones((2, 5))}
    wide = jnp.zeros((2, 5)).at[0, :3].set(-7.0)
    grads = {"x": {"D": jnp.asarray([1.0, 1.5, -2.0, 0.0])}, "w": wide}

    _, _, report = run(params, grads, clamp=1.0, max_norm=None)

    assert float(report["optim/state/clamped_share"]) == 0.5
    np.testing.assert_allclose(report["optim/rest/clamped_share"], 0.3, rtol=1e-6)
    np.testing.assert_allclose(report["grad_norm"], np.sqrt(7.25 + 147), rtol=1e-6)
    np.testing.assert_allclose(report["grad_norm_clipped"], np.sqrt(6), rtol=1e-6)


def test_a_huge_gradient_is_reported_as_it_is_and_clipped_to_the_limit():
    params = {"w": jnp.ones(2)}

    updates, _, report = run(
        params, {"w": jnp.asarray([1e20, 1.0])}, rules=RULES[2:], name="adamw"
    )

    np.testing.assert_allclose(report["grad_norm"], 1e20, rtol=1e-6)
    np.testing.assert_allclose(report["grad_norm_clipped"], 1.0, rtol=1e-6)
    assert (updates["w"] < 0).any()


def test_the_share_at_the_floor_is_where_the_gradient_is_below_eps1():
    params = {"w": jnp.ones(4)}
    grads = {"w": jnp.asarray([1e-3, 1e-3, 1e-5, 0.0])}

    _, _, report = run(
        params, grads, rules=RULES[2:], adafactor=AdafactorConfig(eps1=1e-4)
    )

    assert float(report["optim/all/eps_floor_share"]) == 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lost_updates_of_bf16_weights_are_reported_and_float32_ones_move(dtype):
    """B072: at lr 3e-5 a bf16 weight does not feel its update."""
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.standard_normal((64, 64)) * 0.02, dtype)
    params = {"w": start}
    cfg = OptimConfig(lr=3e-5, schedule="constant", warmup_steps=0)
    optimizer = make_optimizer(cfg, params, steps=20)
    update, state = jax.jit(optimizer.update), optimizer.init(params)

    for _ in range(20):
        grads = {"w": jnp.asarray(rng.standard_normal((64, 64)) + 1.0, jnp.float32)}
        before = params
        updates, state, report = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        lost = np.mean(np.asarray(params["w"]) == np.asarray(before["w"]))
        np.testing.assert_allclose(report["optim/all/lost_share"], lost, atol=1e-3)

    moved = float(jnp.mean(params["w"] != start))
    if dtype == "float32":
        assert float(report["optim/all/lost_share"]) < 0.01
        assert moved > 0.99
    else:
        assert float(report["optim/all/lost_share"]) > 0.95
        assert moved < 0.1


def test_an_update_of_zero_is_not_a_lost_one():
    _, _, report = run({"w": jnp.ones(3)}, {"w": jnp.zeros(3)}, rules=RULES[2:])

    assert float(report["optim/all/lost_share"]) == 0.0
    assert float(report["optim/all/update_ratio"]) == 0.0


def test_the_ratio_of_parameters_at_zero_is_finite():
    _, _, report = run({"w": jnp.zeros(3)}, {"w": jnp.ones(3)}, rules=RULES[2:])

    assert np.isfinite(report["optim/all/update_ratio"])
    assert float(report["optim/all/update_ratio"]) > 1.0


def test_paths_are_matched_by_name_where_the_two_orders_differ():
    """'a-b' sorts before 'a/x' as a path and after 'a' as a key."""
    rules = (Rule(pattern="a-b/.*", name="first"), Rule(pattern="a/.*", name="second"))
    params = {"a": {"x": jnp.ones(2)}, "a-b": {"x": jnp.full(2, 8.0)}}
    grads = {"a": {"x": jnp.full(2, 1e-9)}, "a-b": {"x": jnp.asarray([3.0, 4.0])}}

    _, _, report = run(params, grads, rules=rules, max_norm=None, lr=1e-2)

    np.testing.assert_allclose(report["optim/first/grad_norm"], 5.0, rtol=1e-6)
    np.testing.assert_allclose(report["optim/first/update_ratio"], 1e-2, rtol=1e-5)
    assert float(report["optim/first/eps_floor_share"]) == 0.0
    assert float(report["optim/second/eps_floor_share"]) == 1.0


def test_large_leaves_are_sampled_for_lost_updates_but_not_for_clamped_elements():
    """A quarter of the rows is looked at; one huge element is still seen."""
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.standard_normal((512, 512)) * 0.02, jnp.bfloat16)
    grads = jnp.asarray(rng.uniform(0.1, 0.9, (512, 512)), jnp.float32)
    grads = grads.at[1, 1].set(7.0)

    updates, _, report = run(
        {"w": start}, {"w": grads}, rules=RULES[2:], lr=4e-3, clamp=1.0
    )

    new = optax.apply_updates({"w": start}, updates)["w"]
    lost = np.mean(np.asarray(new) == np.asarray(start))
    assert 0.1 < lost < 0.9
    np.testing.assert_allclose(report["optim/all/lost_share"], lost, atol=0.01)
    np.testing.assert_allclose(report["optim/all/clamped_share"], 2.0**-18, rtol=1e-6)


def test_counts_are_exact_beyond_the_integers_of_float32():
    mask = jnp.ones((3, 2**23), bool)

    assert int(jax.jit(_count)(mask)) == 3 * 2**23
