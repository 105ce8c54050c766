"""bfloat16 weights and gradients: unbiased rounding, at the ends too, and by key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.config import OptimConfig
from bitmamba.optim import make_optimizer
from bitmamba.optim.narrow import add_rounded, kept_gradients, stochastic_round

pytestmark = pytest.mark.newest

LARGEST = float(jnp.finfo(jnp.bfloat16).max)
KEY = jax.random.key(3)


def rounded(x, key=KEY):
    """As float32, which holds every bfloat16."""
    run = jax.jit(lambda x, key: stochastic_round(x, key=key).astype(jnp.float32))
    return np.asarray(run(np.float32(x), key))


def neighbours(x):
    """The bfloat16 numbers around float32 values: towards zero, and away from it."""
    bits = np.float32(x).view(np.uint32)
    below = bits & np.uint32(0xFFFF0000)
    return below.view(np.float32), (below + np.uint32(0x10000)).view(np.float32)


@pytest.mark.parametrize("over", ["keys", "places"])
def test_the_mean_is_the_value(over):
    # From subnormal to huge, on both sides of a power of two, and nearly representable.
    x = np.float32([1.001, -1.999, 3e-3, 1e-39, -7e30, 255.99, 1.00001, 0.3, 1e-20])
    n = 2**14
    if over == "keys":
        keys = jax.random.split(KEY, n)
        draws = jax.jit(jax.vmap(lambda k: stochastic_round(jnp.asarray(x), key=k)))
        got = np.asarray(draws(keys).astype(jnp.float32))
    else:
        got = rounded(np.broadcast_to(x, (n, len(x))))

    below, above = (np.float64(v) for v in neighbours(x))
    step = above - below
    share = (np.float64(x) - below) / step
    assert ((got == np.float32(below)) | (got == np.float32(above))).all()
    # Shares of a fair coin lie within 4.5 standard deviations, but for 7 in a million.
    error = (np.float64(got).mean(0) - np.float64(x)) / step
    assert (np.abs(error) <= 4.5 * np.sqrt(share * (1 - share) / n) + 1e-9).all()
    assert (np.ptp(got, axis=0) > 0).all()


def test_what_bfloat16_holds_is_left_as_it_is():
    x = np.float32([0.0, -0.0, 1.0, -1.5, 2.0**-133, LARGEST, -LARGEST, 3.0e38])
    x = np.float32(jnp.asarray(x, jnp.bfloat16))

    for seed in range(8):
        got = rounded(x, jax.random.key(seed))
        assert np.array_equal(got.view(np.uint32), x.view(np.uint32))


def test_finite_stays_finite_and_the_rest_what_it_is():
    top = np.finfo(np.float32).max
    x = np.float32([top, -top, np.nextafter(np.float32(LARGEST), np.float32(np.inf))])
    for seed in range(16):
        got = rounded(x, jax.random.key(seed))
        assert np.array_equal(got, np.float32([LARGEST, -LARGEST, LARGEST]))

    got = rounded(np.float32([np.inf, -np.inf, np.nan]))

    assert got[0] == np.inf
    assert got[1] == -np.inf
    assert np.isnan(got[2])


def test_neither_places_nor_keys_share_their_numbers():
    x = np.full((64, 64), 1.0 + 2.0**-8, np.float32)  # half way: a fair coin
    ups = np.stack([rounded(x, jax.random.key(k)) > 1 for k in range(64)])
    centred = 2.0 * ups.reshape(64, -1) - 1

    between_keys = centred @ centred.T / centred.shape[1]
    along_rows = (centred[:, 1:] * centred[:, :-1]).mean()
    along_columns = (centred[:, 64:] * centred[:, :-64]).mean()

    # 4096 coins a key: a standard deviation is 1/64.
    np.fill_diagonal(between_keys, 0)
    assert np.abs(between_keys).max() < 5 / 64
    assert abs(along_rows) < 5 / 512
    assert abs(along_columns) < 5 / 512


def test_small_updates_move_the_mean_of_bfloat16_weights_and_not_nearest_ones():
    # Each is a twentieth of half a step: rounding to nearest would lose all of them.
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(3)}
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-8 / 20), params)
    add = jax.jit(lambda p, key: add_rounded(p, updates, key=key))

    moved = params
    for i in range(40):
        moved = add(moved, jax.random.fold_in(KEY, i))

    assert moved["w"].dtype == jnp.bfloat16
    expected = 1 + 40 * 2.0**-8 / 20
    step, n = 2.0**-7, 64 * 64
    spread = step * np.sqrt(40 * 0.25 / n)  # 40 draws of variance <= 1/4
    assert abs(np.float64(moved["w"]).mean() - expected) < 4.5 * spread
    np.testing.assert_allclose(moved["b"], expected, rtol=40 * 2.0**-24)
    assert (params["w"] + updates["w"].astype(jnp.bfloat16) == 1).all()


def test_leaves_of_one_shape_are_rounded_each_in_its_way():
    params = {"a": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones((8, 8), jnp.bfloat16)}
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-8), params)

    got = add_rounded(params, updates, key=KEY)
    again = add_rounded(params, updates, key=KEY)

    assert not np.array_equal(got["a"], got["b"])
    assert np.array_equal(got["a"], again["a"])


def test_only_matrices_have_narrow_gradients():
    shapes = {"kernel": (4, 6), "scale": (4,), "conv": (4, 1, 6)}
    grads = {name: jnp.ones(shape) for name, shape in shapes.items()}

    kept = kept_gradients(grads, dtype="bfloat16")

    dtypes = {name: str(g.dtype) for name, g in kept.items()}
    assert dtypes == {"kernel": "bfloat16", "scale": "float32", "conv": "float32"}
    back = kept_gradients(kept, dtype="float32")
    assert {g.dtype for g in back.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_of_matrices_are_kept_as_their_gradients_are(dtype):
    cfg = OptimConfig(gradient_dtype=dtype)
    params = {"kernel": jnp.ones((4, 6)), "scale": jnp.ones(4)}
    optimizer = make_optimizer(cfg, params, steps=5)
    grads = kept_gradients(params, dtype=dtype)

    updates, state, _ = optimizer.update(grads, optimizer.init(params), params)

    assert updates["kernel"].dtype == jnp.dtype(dtype)
    assert updates["scale"].dtype == jnp.float32
    stats = jax.tree.leaves(state["precondition"].stats)
    assert {leaf.dtype for leaf in stats} == {jnp.dtype("float32")}
