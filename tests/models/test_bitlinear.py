import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.config import BitLinearConfig
from bitmamba.models.bitlinear import (
    bit_linear,
    fake_quant_activations,
    fake_quant_weight,
    quantise_activations,
)

CONFIGS = [
    BitLinearConfig(act_eps=e, rounding=r)
    for e in ("max", "add")
    for r in ("even", "away")
]


def _name(cfg):
    return f"{cfg.act_eps}-{cfg.rounding}"


@pytest.mark.parametrize("cfg", CONFIGS, ids=_name)
def test_codes_at_ties_and_ends(cfg):
    # With absmax 127 the step is one (up to the added epsilon, which breaks ties).
    x = jnp.array([[127.0, -127.0, 0.5, 1.5, -0.5, -2.5, 0.49999997, 0.0]])

    codes, scale = quantise_activations(x, cfg)

    if cfg.act_eps == "add":
        assert codes[0, :2].tolist() == [127, -127]
        assert float(scale[0, 0]) == pytest.approx(1 + 1e-5 / 127)
        return
    ties = {"even": [0, 2, 0, -2], "away": [1, 2, -1, -3]}[cfg.rounding]
    assert codes[0].tolist() == [127, -127, *ties, 0, 0]
    assert float(scale[0, 0]) == 1.0


@pytest.mark.parametrize(("eps", "expected"), [("max", 1e-5), ("add", 1.1e-5)])
def test_small_activations_are_scaled_by_the_floor(eps, expected):
    x = jnp.array([[1e-6, -5e-7]])

    codes, scale = quantise_activations(x, BitLinearConfig(act_eps=eps))

    assert float(scale[0, 0]) == pytest.approx(expected / 127, rel=1e-6)
    assert codes[0, 0] == np.round(1e-6 * 127 / expected)


@pytest.mark.parametrize("cfg", CONFIGS, ids=_name)
def test_values_and_gradients_equal_the_straight_through_formula(
    cfg, float64, relative_error
):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 24)).astype(np.float32)
    w = rng.standard_normal((24, 9)).astype(np.float32)
    dy = rng.standard_normal((2, 5, 9)).astype(np.float32)

    def values_and_gradients(function, x, w, dy):
        y, pull = jax.vjp(function, x, w)
        return y, *pull(dy)

    run = jax.jit(values_and_gradients, static_argnums=0)
    got = run(lambda x, w: bit_linear(x, w, cfg, jnp.dtype("float32")), x, w, dy)
    with jax.enable_x64(True):
        margins = []
        x64, w64, dy64 = (jnp.asarray(t, jnp.float64) for t in (x, w, dy))
        expected = run(lambda x, w: _formula(float64, x, w, cfg), x64, w64, dy64)
        float64.quantised_input(x64, cfg, margins)
        float64.quantised_weight(w64, margins)
        margin = min(float(m) for m in margins)

    assert margin > 1e-4, "too near a rounding tie to compare; take another seed"
    assert relative_error(got, expected) < 1e-6


def _formula(float64, x, w, cfg):
    stop = jax.lax.stop_gradient
    x = x + stop(float64.quantised_input(x, cfg) - x)
    w = w + stop(float64.quantised_weight(w) - w)
    return x @ w


def test_products_are_exact_in_bfloat16(relative_error):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 1000)).astype(np.float32)
    w = rng.standard_normal((1000, 8)).astype(np.float32)
    cfg = BitLinearConfig()

    narrow = bit_linear(x, w, cfg, jnp.dtype("bfloat16"))
    wide = bit_linear(x, w, cfg, jnp.dtype("float32"))

    assert narrow.dtype == jnp.bfloat16
    assert np.array_equal(narrow, wide.astype(jnp.bfloat16))


def test_gradients_in_bfloat16_keep_their_dtypes(relative_error):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 40)).astype(np.float32)
    w = rng.standard_normal((40, 8)).astype(np.float32)
    dy = rng.standard_normal((3, 8)).astype(np.float32)

    def pull(dtype):
        apply = jax.vjp(
            lambda x, w: bit_linear(x, w, BitLinearConfig(), jnp.dtype(dtype)), x, w
        )[1]
        return apply(jnp.asarray(dy, dtype))

    narrow, wide = pull("bfloat16"), pull("float32")

    assert all(g.dtype == jnp.float32 for g in narrow)
    assert relative_error(narrow, wide) < 2**-7


def test_fake_quantised_values_have_the_gradient_of_their_input(float64):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    cfg = BitLinearConfig()

    activations, pull = jax.vjp(lambda x: fake_quant_activations(x, cfg), x)
    weight, pull_weight = jax.vjp(fake_quant_weight, x)

    assert np.allclose(activations, float64.quantised_input(x, cfg), rtol=1e-6)
    assert np.allclose(weight, float64.quantised_weight(x), rtol=1e-6)
    assert np.array_equal(pull(x)[0], x)
    assert np.array_equal(pull_weight(x)[0], x)
