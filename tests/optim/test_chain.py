"""The order of the stages, each in closed form, and the hints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.config import OptimConfig, Rule
from bitmamba.optim import TRANSFORMS, Hyper, chain_hints, make_optimizer

ORDER = [
    "float32",
    "clamp",
    "norm_clip",
    "precondition",
    "decay",
    "groups",
    "schedule",
    "sign",
]
PARAMS = {"a": {"w": jnp.full(2, 4.0)}, "b": {"w": jnp.full(2, 4.0)}}
RULES = (
    Rule(pattern="a/.*", name="a", lr_mult=50.0, decay=False),
    Rule(pattern="b/.*", name="b"),
)


def optimizer_for(params=PARAMS, *, clamp_allowed=True, **settings):
    cfg = OptimConfig(schedule="constant", warmup_steps=0, **settings)
    return make_optimizer(cfg, params, steps=4, clamp_allowed=clamp_allowed)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_stages_are_named_in_their_fixed_order(name):
    optimizer = optimizer_for(name=name, clamp=1.0, weight_decay=0.1)

    assert list(optimizer.init(PARAMS)) == ORDER


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_the_plain_transform_gives_the_same_updates(name):
    optimizer = optimizer_for(name=name, clamp=0.5, weight_decay=0.1, rules=RULES)
    grads = jax.tree.map(lambda p: 0.3 * p, PARAMS)
    state = optimizer.init(PARAMS)

    updates, new_state, _ = optimizer.update(grads, state, PARAMS)
    plain, plain_state = optimizer.transform.update(grads, state, PARAMS)

    jax.tree.map(np.testing.assert_array_equal, updates, plain)
    jax.tree.map(np.testing.assert_array_equal, new_state, plain_state)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_multiplier_and_decay_come_after_the_preconditioner(name):
    """Adafactor's direction is rms(θ) = 4 times the sign, AdamW's the sign."""
    optimizer = optimizer_for(name=name, lr=1e-3, weight_decay=0.5, rules=RULES)
    grads = jax.tree.map(jnp.ones_like, PARAMS)

    updates, _, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)

    direction = 4.0 if name == "adafactor" else 1.0
    np.testing.assert_allclose(updates["a"]["w"], -1e-3 * 50 * direction, rtol=1e-5)
    decayed = -1e-3 * (direction + 0.5 * 4)
    np.testing.assert_allclose(updates["b"]["w"], decayed, rtol=1e-5)


def test_the_clamp_comes_before_the_norm_and_both_before_the_preconditioner():
    """[9, 9] and [0.5, 0] clamp to 1, norm 1.5 clips to 0.75: halves."""
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    grads = {"a": jnp.asarray([9.0, -9.0]), "b": jnp.asarray([0.5, 0.0])}
    optimizer = optimizer_for(params, name="adamw", clamp=1.0, max_norm=0.75)

    _, state, report = optimizer.update(grads, optimizer.init(params), params)

    mu = state["precondition"].mu
    np.testing.assert_allclose(mu["a"], [0.05, -0.05], rtol=1e-5)
    np.testing.assert_allclose(mu["b"], [0.025, 0.0], rtol=1e-5)
    np.testing.assert_allclose(report["grad_norm_clipped"], 0.75, rtol=1e-6)


def test_the_norm_is_taken_over_all_groups_together():
    grads = {"a": {"w": jnp.asarray([3.0, 0.0])}, "b": {"w": jnp.asarray([0.0, 4.0])}}
    optimizer = optimizer_for(name="adamw", rules=RULES, max_norm=1.0)

    _, state, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)

    mu = state["precondition"].mu
    np.testing.assert_allclose(mu["a"]["w"], [0.06, 0.0], rtol=1e-5)
    np.testing.assert_allclose(mu["b"]["w"], [0.0, 0.08], rtol=1e-5)


def test_no_clamp_where_it_is_not_allowed():
    grads = jax.tree.map(lambda p: 9.0 * jnp.ones_like(p), PARAMS)
    optimizer = optimizer_for(
        name="adamw", clamp=1.0, max_norm=None, clamp_allowed=False
    )

    _, state, report = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)

    np.testing.assert_allclose(state["precondition"].mu["a"]["w"], 0.9, rtol=1e-5)
    assert not any("clamped" in key for key in report)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_decay_of_adafactor_is_not_capped_and_not_scaled(name):
    """PyTorch: θ·(1 - lr·wd), whatever 1/√t; zero gradients show it alone."""
    optimizer = optimizer_for(name=name, lr=5.0, weight_decay=0.1, max_norm=None)
    zero = jax.tree.map(jnp.zeros_like, PARAMS)

    updates, _, _ = optimizer.update(zero, optimizer.init(PARAMS), PARAMS)

    np.testing.assert_allclose(updates["a"]["w"], -5.0 * 0.1 * 4.0, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_state_and_updates_are_float32_and_keep_their_structure(name):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    optimizer = optimizer_for(params, name=name, weight_decay=0.1)
    state = optimizer.init(params)

    updates, new_state, report = jax.jit(optimizer.update)(params, state, params)

    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}
    kinds = {x.dtype.name for x in jax.tree.leaves(new_state)}
    assert kinds == {"float32", "int32"}
    assert jax.tree.structure(state) == jax.tree.structure(new_state)
    assert {x.dtype.name for x in report.values()} == {"float32"}
    assert optax.apply_updates(params, updates)["a"]["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_bad_gradient_shows_in_the_norm_the_guard_reads(name, bad):
    grads = {"a": {"w": jnp.asarray([bad, 1.0])}, "b": {"w": jnp.ones(2)}}
    for settings in ({}, {"clamp": 1.0}, {"max_norm": None}, {"norm": "inf"}):
        optimizer = optimizer_for(name=name, **settings)

        _, _, report = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)

        assert not jnp.isfinite(report["grad_norm"])


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ValueError, match=r"optim\.name: got 'sgd'; expected one of"):
        optimizer_for(name="sgd")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clamp": 1.0, "max_norm": 1.0, "norm": "inf"}, ["never fires"]),
        ({"clamp": 1.0, "max_norm": 0.5, "norm": "inf"}, []),
        ({"clamp": 1.0, "max_norm": 1.0}, []),
        ({"clamp": 1.0, "max_norm": None, "norm": "inf"}, []),
        ({"warmup_steps": 100}, ["never reached"]),
        ({"lr": 0.2}, ["caps it"]),
        ({"lr": 0.2, "name": "adamw"}, []),
        ({}, []),
    ],
)
def test_hints_name_settings_without_effect(settings, said):
    hints = chain_hints(OptimConfig(**settings), steps=100)

    assert len(hints) == len(said)
    assert all(words in hint for words, hint in zip(said, hints, strict=True))


def test_a_clamp_that_the_mode_drops_is_said_and_then_no_reason_for_others():
    cfg = OptimConfig(clamp=1.0, max_norm=1.0, norm="inf")

    hints = chain_hints(cfg, steps=100, clamp_allowed=False)

    assert hints == ["optim.clamp=1 is not used in this mode"]


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_values_given_at_run_time_replace_the_config(name, decay):
    own = optimizer_for(name=name, lr=0.9, weight_decay=decay, rules=RULES)
    other = optimizer_for(name=name, lr=7.0, weight_decay=9.0, rules=RULES)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    values = Hyper(jnp.float32(0.9), jnp.float32(decay))
    state = own.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(other.init(PARAMS))

    for _ in range(3):
        updates, new_state, report = own.update(grads, state, PARAMS)
        given = other.update(grads, state, PARAMS, values)
        jax.tree.map(np.testing.assert_array_equal, given, (updates, new_state, report))
        state = new_state
