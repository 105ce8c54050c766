"""Adafactor against PyTorch's own trace, float64, optax, and gradients of zero."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.config import AdafactorConfig, OptimConfig
from bitmamba.optim import make_optimizer
from bitmamba.optim.adafactor import AdafactorState, at_floor, scale_by_adafactor

pytestmark = pytest.mark.newest

CASES = ["matrix", "tall", "vector", "scalar", "conv", "batch", "zeros", "late"]
ZERO_GRADIENTS = {"matrix", "vector", "conv", "late"}
STEPS = 5
BF16_ULP = 2.0**-7  # of the power of two below


@pytest.fixture(scope="module")
def torch_trace():
    path = Path(__file__).parent / "fixtures" / "torch_adafactor.npz"
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def optimizer_for(*, lr=1e-2, weight_decay=0.0, params, **adafactor):
    cfg = OptimConfig(
        lr=lr,
        schedule="constant",
        warmup_steps=0,
        max_norm=None,
        weight_decay=weight_decay,
        adafactor=AdafactorConfig(**adafactor),
    )
    return make_optimizer(cfg, params, steps=STEPS)


def run_like(trace, variant, *, scale=1.0, **settings):
    """Our parameters after each step, from the trace's start and gradients."""
    params = {n: jnp.asarray(trace[f"{variant}/param/{n}"][0]) for n in CASES}
    optimizer = optimizer_for(params=params, **settings)
    state, update = optimizer.init(params), jax.jit(optimizer.transform.update)
    history = []
    for t in range(STEPS):
        grads = {n: jnp.asarray(trace[f"grad/{n}"][t] * scale) for n in CASES}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.tree.map(np.asarray, params))
    return history


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("default", {}),
        ("small", {"scale": 2.0**-13}),
        ("decay", {"weight_decay": 0.1, "clip_threshold": 1.5}),
    ],
)
def test_float32_follows_torch_step_by_step(torch_trace, variant, settings):
    history = run_like(torch_trace, variant, **settings)

    for name in CASES:
        for t, params in enumerate(history):
            want = torch_trace[f"{variant}/param/{name}"][t + 1]
            error = np.abs(params[name] - want) / np.maximum(np.abs(want), 1e-3)
            assert error.max() <= 2e-6, (name, t)


def test_relative_step_caps_the_rate_as_torch_does(torch_trace):
    """At lr 0.8 > 1/√t parameters cross zero, so errors are relative to the leaf."""
    history = run_like(torch_trace, "cap", lr=0.8)
    free = run_like(torch_trace, "cap", lr=0.8, relative_step=False)

    for name in CASES:
        for t, params in enumerate(history):
            want = torch_trace[f"cap/param/{name}"][t + 1]
            size = max(np.sqrt(np.mean(want**2)), 1e-3)
            assert np.abs(params[name] - want).max() <= 2e-6 * size, (name, t)
    assert np.abs(free[-1]["tall"] - history[-1]["tall"]).max() > 0.1


def test_eps1_of_1e_minus_30_is_nan_in_torch_and_finite_here(torch_trace):
    history = run_like(torch_trace, "eps1e-30", eps1=1e-30)

    for name in CASES:
        want = torch_trace[f"eps1e-30/param/{name}"]
        ours = np.stack([params[name] for params in history])
        assert np.isfinite(ours).all()
        if name in ZERO_GRADIENTS:
            assert np.isnan(want[1:]).any()
        else:
            error = np.abs(ours - want[1:]) / np.maximum(np.abs(want[1:]), 1e-3)
            assert error.max() <= 2e-6


def float64_step(p, g, row, col, *, t, lr, eps1, eps2=1e-3):
    """The rule as PyTorch documents it, where 1e-60 is a number."""
    weight = t**-0.8
    row = row + weight * (np.mean(g * g, -1, keepdims=True) - row)
    col = col + weight * (np.mean(g * g, -2, keepdims=True) - col)
    variance = row * col / np.maximum(np.mean(row, -2, keepdims=True), eps1)
    u = g / np.sqrt(np.maximum(variance, eps1**2))
    step = max(eps2, np.sqrt(np.mean(p * p))) * min(lr, t**-0.5)
    return p - step * u / max(1.0, np.sqrt(np.mean(u * u))), row, col


@pytest.mark.parametrize("eps1", [1e-30, 1e-12, 1e-3, 1e-2])
@pytest.mark.parametrize("size", [1e5, 1.0, 1e-5, 1e-10])
def test_every_eps1_follows_the_rule_in_float64(eps1, size):
    """Zero rows and columns included; where float32 squares underflow as well."""
    rng = np.random.default_rng(0)
    want = rng.standard_normal((6, 5)) * 0.1
    row, col = np.zeros((6, 1)), np.zeros((1, 5))
    params = {"w": jnp.asarray(want, jnp.float32)}
    transform = optimizer_for(params=params, eps1=eps1).transform
    state, update = transform.init(params), transform.update

    for t in range(1, 4):
        grad = rng.standard_normal((6, 5)) * size
        grad[2], grad[:, 1] = 0, 0
        grad = grad.astype(np.float32)
        want, row, col = float64_step(
            want, grad.astype(np.float64), row, col, t=t, lr=1e-2, eps1=eps1
        )
        updates, state = update({"w": grad}, state, params)
        params = optax.apply_updates(params, updates)

    error = np.abs(params["w"] - want) / np.maximum(np.abs(want), 1e-3)
    assert error.max() <= 2e-6


@pytest.mark.parametrize("name", CASES)
def test_bf16_parameters_follow_torch_from_its_own_state(torch_trace, name):
    """Torch rounds each operation to bf16, we only the sum: near, not equal."""
    transform = scale_by_adafactor(AdafactorConfig(), schedule=lambda _: 1e-2)
    keys = {"row": "row_var", "col": "col_var", "full": "variance"}

    for t in range(STEPS):
        before, after = torch_trace[f"bf16/param/{name}"][t : t + 2]
        param = jnp.asarray(before, jnp.bfloat16)
        state = transform.init(param)
        if t:
            stats = {
                k: jnp.asarray(torch_trace[f"bf16/{keys[k]}/{name}"][t - 1])
                for k in state.stats
            }
            state = AdafactorState(count=jnp.int32(t), stats=stats)
        grad = jnp.asarray(torch_trace[f"grad/{name}"][t], jnp.bfloat16)
        direction, _ = transform.update(grad, state, param)
        new = (param - 1e-2 * direction).astype(jnp.bfloat16)

        ulp = BF16_ULP * 2.0 ** np.floor(np.log2(np.maximum(np.abs(after), 1e-30)))
        error = np.abs(np.asarray(new, np.float32) - after)
        largest = np.abs(1e-2 * np.asarray(direction)).max()
        assert (error <= ulp + 0.02 * largest).all(), t


@pytest.mark.parametrize("rule", ["torch", "optax"])
@pytest.mark.parametrize("eps1", [None, 0.0, 1e-30])
def test_zero_gradients_leave_parameters_and_then_training_goes_on(rule, eps1):
    """B067, B068, B069: five steps of nothing, then a usual gradient."""
    params = {
        f"{dtype}_{len(shape)}": jnp.full(shape, 0.5, dtype)
        for dtype in ("float32", "bfloat16", "float16")
        for shape in ((4, 3), (3,), ())
    }
    optimizer = optimizer_for(params=params, eps1=eps1, rule=rule)
    state, update = optimizer.init(params), optimizer.update
    zero = jax.tree.map(jnp.zeros_like, params)

    for _ in range(5):
        updates, state, report = update(zero, state, params)
        assert all((u == 0).all() for u in jax.tree.leaves(updates))
        assert float(report["grad_norm"]) == 0
    usual = jax.tree.map(lambda p: jnp.full_like(p, 0.1), params)
    updates, state, _ = update(usual, state, params)

    for u in jax.tree.leaves(updates):
        assert jnp.isfinite(u).all()
        assert (u < 0).all()


@pytest.mark.parametrize("rule", ["torch", "optax"])
@pytest.mark.parametrize("size", [1e5, 1e15])
def test_one_zero_row_among_large_ones_is_finite(rule, size):
    """OWN-9: optax's own Adafactor gives NaN here at step 1."""
    grads = {"w": jnp.full((4, 3), size).at[1].set(0.0)}
    params = {"w": jnp.ones((4, 3))}
    optimizer = optimizer_for(params=params, rule=rule)

    updates, _, _ = optimizer.update(grads, optimizer.init(params), params)

    assert jnp.isfinite(updates["w"]).all()
    assert (updates["w"][1] == 0).all()
    assert (updates["w"][0] < 0).all()


@pytest.mark.parametrize("scale_parameter", [True, False])
def test_optax_rule_equals_optax(scale_parameter):
    """The same epsilon, factored over any size, and no 1/√t, which optax lacks."""
    rng = np.random.default_rng(1)
    params = {
        "matrix": jnp.asarray(rng.standard_normal((6, 8)), jnp.float32),
        "vector": jnp.asarray(rng.standard_normal(5), jnp.float32),
    }
    ours = optimizer_for(
        params=params,
        rule="optax",
        relative_step=False,
        scale_parameter=scale_parameter,
        clip_threshold=0.9,
    )
    theirs = optax.adafactor(
        1e-2,
        min_dim_size_to_factor=1,
        multiply_by_parameter_scale=scale_parameter,
        clipping_threshold=0.9,
    )
    state, their_state, their_params = ours.init(params), theirs.init(params), params

    for _ in range(4):
        grads = jax.tree.map(
            lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params
        )
        updates, state, report = ours.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        their_updates, their_state = theirs.update(grads, their_state, their_params)
        their_params = optax.apply_updates(their_params, their_updates)

    for name, want in their_params.items():
        np.testing.assert_allclose(params[name], want, rtol=2e-6)
    assert not any("eps_floor" in key for key in report)


def test_eps1_none_is_the_finfo_of_each_parameter():
    """OWN-5: torch takes the first parameter's for a whole group."""
    params = {"a": jnp.ones((4,)), "b": jnp.ones((4,), jnp.bfloat16)}
    transform = scale_by_adafactor(AdafactorConfig(), schedule=lambda _: 1e-2)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-4), params)

    direction, state = transform.update(grads, transform.init(params), params)

    np.testing.assert_allclose(direction["a"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(direction["b"], 1e-4 / 2**-7, rtol=1e-2)
    floors = at_floor(state, params, cfg=AdafactorConfig())
    assert not floors["a"].any()
    assert floors["b"].all()


def test_closed_form_of_the_first_step_on_two_leaves():
    """After one step V = g², so U is the sign, and the step max(eps2, rms)·lr."""
    params = {"w": jnp.full((2, 3), 0.5), "b": jnp.zeros(2)}
    grads = {"w": jnp.full((2, 3), -4.0), "b": jnp.asarray([2.0, -2.0])}
    optimizer = optimizer_for(params=params, eps2=1e-2)

    updates, _, _ = optimizer.update(grads, optimizer.init(params), params)

    np.testing.assert_allclose(updates["w"], 0.5e-2, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-1e-4, 1e-4], rtol=1e-6)


def test_beta2_decay_sets_the_second_steps_weight():
    """V after gradients 1 and 3 is 1 + 8·2^-decay."""
    params = {"b": jnp.ones(1)}
    for decay in (0.8, 0.5):
        optimizer = optimizer_for(params=params, beta2_decay=decay)
        state = optimizer.init(params)
        for g in (1.0, 3.0):
            _, state, _ = optimizer.update({"b": jnp.full(1, g)}, state, params)
        full = state["precondition"].stats["b"]["full"]
        np.testing.assert_allclose(full, 1 + 8 * 2.0**-decay, rtol=1e-6)


def test_state_of_a_large_projection_is_its_rows_and_columns():
    """spec B6: (2048, 8512) needs 42 KB where AdamW's moments take 139 MB."""
    shape = {"w": jax.ShapeDtypeStruct((2048, 8512), jnp.float32)}

    def state_bytes(name):
        optimizer = make_optimizer(OptimConfig(name=name), shape, steps=1)
        state = jax.eval_shape(optimizer.init, shape)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    assert state_bytes("adafactor") == 4 * (2048 + 8512) + 4 + 4
    assert state_bytes("adamw") == 4 * 2 * 2048 * 8512 + 4 + 4


def test_unknown_rule_and_missing_params_are_refused():
    with pytest.raises(ValueError, match=r"optim\.adafactor\.rule: got 'tf'"):
        optimizer_for(params={"b": jnp.ones(1)}, rule="tf")
    transform = scale_by_adafactor(AdafactorConfig(), schedule=lambda _: 1e-2)
    with pytest.raises(ValueError, match="params: got None"):
        transform.update(jnp.ones(1), transform.init(jnp.ones(1)))
