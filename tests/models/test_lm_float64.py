"""The whole model against the same equations in float64: logits and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.newest


def _tokens(length):
    return np.random.default_rng(0).integers(0, 48, (1, 9)).astype(np.int32)[:, :length]


def _both_precisions(cfg, made, tokens, float64):
    """((gradients, logits), the same in float64, distance from a rounding tie)."""
    model, params = made
    cotangent = np.random.default_rng(1).integers(-24, 24, (1, tokens.shape[1], 48))

    def loss(params):
        logits = model.apply({"params": params}, tokens)
        return (logits * cotangent).sum(), logits

    def loss64(params):
        margins = [jnp.inf]
        logits = float64.lm(params, tokens[0], cfg, margins)[None]
        margin = jnp.stack(margins).min()
        return (logits * cotangent).sum(), (logits, margin)

    got = jax.jit(jax.grad(loss, has_aux=True))(params)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda t: jnp.asarray(t, jnp.float64), params)
        grad = jax.grad(loss64, has_aux=True)
        options = {"xla_backend_optimization_level": 0}
        gradients, (logits, margin) = jax.jit(grad, compiler_options=options)(wide)
        return got, (gradients, logits), float(margin)


@pytest.mark.parametrize(
    ("pattern", "tied"), [("MB*-", False), ("-", True)], ids=["untied", "tied"]
)
def test_logits_and_all_gradients_equal_float64(
    pattern, tied, tiny, float64, make_lm, relative_error
):
    cfg = tiny(pattern, tie_embeddings=tied)
    tokens = _tokens(9)

    got, expected, _ = _both_precisions(cfg, make_lm(cfg), tokens, float64)

    assert relative_error(got, expected) < 1e-5


def test_ternary_logits_and_all_gradients_equal_float64(
    tiny, float64, make_lm, relative_error
):
    cfg = tiny("MB", linear="bit", norm_eps=1e-6)
    tokens = _tokens(5)

    made = make_lm(cfg, seed=381)
    got, expected, margin = _both_precisions(cfg, made, tokens, float64)

    assert margin > 1e-3, "too near a rounding tie to compare; take another seed"
    assert relative_error(got, expected) < 1e-5
