"""AdamW equals optax.adamw, with moments in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.config import AdamWConfig, OptimConfig
from bitmamba.optim import make_optimizer

ADAM = AdamWConfig(b1=0.8, b2=0.95, eps=1e-6)


def adamw(params, **settings):
    cfg = OptimConfig(
        name="adamw",
        lr=1e-2,
        schedule="constant",
        warmup_steps=0,
        max_norm=None,
        adamw=ADAM,
        **settings,
    )
    return make_optimizer(cfg, params, steps=1)


def test_equals_optax_with_decay():
    rng = np.random.default_rng(0)
    params = {
        "matrix": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32),
        "vector": jnp.asarray(rng.standard_normal(4), jnp.float32),
    }
    ours = adamw(params, weight_decay=0.1)
    theirs = optax.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    state, their_state, their_params = ours.init(params), theirs.init(params), params

    for _ in range(5):
        grads = jax.tree.map(
            lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params
        )
        updates, state, _ = ours.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        their_updates, their_state = theirs.update(grads, their_state, their_params)
        their_params = optax.apply_updates(their_params, their_updates)

    for name, want in their_params.items():
        np.testing.assert_allclose(params[name], want, rtol=2e-6, atol=1e-9)


def test_first_step_in_closed_form():
    params = {"w": jnp.asarray([1.0, 1.0]), "b": jnp.asarray(2.0)}
    grads = {"w": jnp.asarray([3.0, -3.0]), "b": jnp.asarray(0.0)}
    optimizer = adamw(params, weight_decay=0.5)

    updates, _, _ = optimizer.update(grads, optimizer.init(params), params)

    np.testing.assert_allclose(updates["w"], [-0.015, 0.005], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], -0.01, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moments_are_float32_and_zero_gradients_finite(dtype):
    params = {"w": jnp.ones((2, 2), dtype)}
    optimizer = adamw(params)
    state = optimizer.init(params)

    for _ in range(3):
        updates, state, _ = optimizer.update(
            {"w": jnp.zeros((2, 2), dtype)}, state, params
        )

    adam = state["precondition"]
    assert adam.mu["w"].dtype == adam.nu["w"].dtype == jnp.float32
    np.testing.assert_array_equal(updates["w"], 0.0)


def test_the_second_moment_of_bf16_parameters_does_not_stall():
    """1 -> 0: after 300 steps of b2 = 0.999 it is 0.741; bf16 stays near 1."""
    params = {"w": jnp.ones(1, jnp.bfloat16)}
    cfg = OptimConfig(name="adamw", max_norm=None)
    optimizer = make_optimizer(cfg, params, steps=1)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    full = jax.tree.map(jnp.ones_like, state["precondition"].nu)
    state["precondition"] = state["precondition"]._replace(nu=full)

    for _ in range(300):
        _, state, _ = update({"w": jnp.zeros(1, jnp.bfloat16)}, state, params)

    np.testing.assert_allclose(state["precondition"].nu["w"], 0.999**300, rtol=1e-4)
