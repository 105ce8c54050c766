"""Norms and the norm clip: equal to optax where it is right, right where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.optim.clipping import clip_by_norm
from bitmamba.optim.norms import join_norms, leaf_norms, rms


def clipped(grads, *, limit=1.0, norm="l2", clamp=None):
    stages = [optax.clip(clamp)] if clamp else []
    chain = optax.chain(*stages, clip_by_norm(limit, norm=norm))
    return chain.update(grads, chain.init(grads))[0]


@pytest.mark.parametrize("limit", [0.5, 3.0, 100.0])
def test_l2_clip_equals_optax(limit):
    rng = np.random.default_rng(0)
    grads = {
        "a": jnp.asarray(rng.standard_normal((4, 3)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal(5), jnp.float32),
    }
    theirs = optax.clip_by_global_norm(limit)
    want, _ = theirs.update(grads, theirs.init(grads))

    got = clipped(grads, limit=limit)

    for name in grads:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


def test_both_norms_in_closed_form_over_two_leaves():
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray(-4.0)}

    l2 = clipped(grads, limit=1.0)
    inf = clipped(grads, limit=1.0, norm="inf")

    np.testing.assert_allclose(l2["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(l2["b"], -0.8, rtol=1e-6)
    np.testing.assert_allclose(inf["a"], [0.75, 0.0], rtol=1e-6)
    np.testing.assert_allclose(inf["b"], -1.0, rtol=1e-6)


@pytest.mark.parametrize("norm", ["l2", "inf"])
def test_a_gradient_within_the_limit_is_untouched_bit_for_bit(norm):
    grads = {"a": jnp.asarray([0.1, -0.3, 1e-30])}

    np.testing.assert_array_equal(clipped(grads, norm=norm)["a"], grads["a"])


@pytest.mark.parametrize("norm", ["l2", "inf"])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_zero_gradient_and_zero_limit_give_zeros(norm, limit):
    """B070: 0/0 in optax."""
    got = clipped({"a": jnp.zeros(2)}, limit=limit, norm=norm)

    np.testing.assert_array_equal(got["a"], 0.0)


@pytest.mark.parametrize("norm", ["l2", "inf"])
@pytest.mark.parametrize("size", [1e20, 3e38])
def test_a_huge_gradient_is_scaled_to_the_limit_and_not_to_zero(norm, size):
    """B071: 1e20² overflows, and optax then gives zeros without a word."""
    grads = {"a": jnp.asarray([size, 1.0]), "b": jnp.asarray([2.0])}
    for clip in (clipped, jax.jit(clipped, static_argnames="norm")):
        got = clip(grads, norm=norm)

        np.testing.assert_allclose(got["a"][0], 1.0, rtol=1e-6)
        assert got["a"][1] < 1e-19


@pytest.mark.parametrize("norm", ["l2", "inf"])
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_bad_gradient_is_loud_everywhere(norm, bad):
    """B071: never an update of zeros; the guard of the step sees the norm."""
    grads = {"a": jnp.asarray([bad, 1.0]), "b": jnp.ones(3)}

    got = clipped(grads, norm=norm)

    assert all(jnp.isnan(x).all() for x in jax.tree.leaves(got))
    assert not jnp.isfinite(join_norms(leaf_norms(grads, norm=norm), norm=norm))


@pytest.mark.parametrize("bad", [jnp.inf, -1e20])
def test_the_clamp_makes_huge_and_infinite_elements_harmless(bad):
    got = clipped({"a": jnp.asarray([bad, 0.0])}, limit=1.0, clamp=1.0)

    np.testing.assert_allclose(got["a"], [np.sign(bad), 0.0], rtol=1e-6)


def test_the_clamp_does_not_hide_nan():
    got = clipped({"a": jnp.asarray([jnp.nan, 0.0])}, limit=1.0, clamp=1.0)

    assert jnp.isnan(got["a"]).all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e15, 1e30])
def test_norms_hold_over_the_whole_range(size):
    rng = np.random.default_rng(0)
    tree = {
        "a": (rng.standard_normal((7, 3)) * size).astype(np.float32),
        "b": (rng.standard_normal(4) * size).astype(np.float32),
    }

    norms = jax.jit(leaf_norms)(tree)

    for name, x in tree.items():
        want = np.linalg.norm(x.astype(np.float64))
        np.testing.assert_allclose(norms[name], want, rtol=1e-6)
    flat = np.concatenate([x.ravel() for x in tree.values()]).astype(np.float64)
    np.testing.assert_allclose(join_norms(norms), np.linalg.norm(flat), rtol=1e-6)


def test_leaf_norms_can_clamp_first():
    norms = leaf_norms({"a": jnp.asarray([3.0, -9.0, 0.5])}, clamp=1.0)

    np.testing.assert_allclose(norms["a"], 1.5, rtol=1e-6)


def test_rms_of_bf16_is_taken_in_float32():
    assert rms(jnp.full(1000, 0.1, jnp.bfloat16)).dtype == jnp.float32
    np.testing.assert_allclose(rms(jnp.full(1000, 0.5, jnp.bfloat16)), 0.5, rtol=1e-6)
