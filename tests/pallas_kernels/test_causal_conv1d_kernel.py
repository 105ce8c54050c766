"""The kernels of the convolution, interpreted with races raised, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d, compat
from pallas_kernels.causal_conv1d import launch

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)
# Largest error over largest value: float32 sums; one rounding to bfloat16 is 2^-9, and
# the truth is of the rounded inputs.
FLOAT32, BFLOAT16 = 1e-6, 4e-3
SEGMENTS = np.array([[5] * 3 + [1] * 1 + [5] * 9 + [0] * 4, [2] * 16 + [3]], np.int32)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Stretches of 6 tokens, so that a few tokens cross them."""
    monkeypatch.setattr(launch, "DEFAULT", launch.Blocks(6, 256))


def inputs(channels, taps=4, *, length=17, dtype=jnp.float32, bias=True, seed=0):
    """x, weight, bias, initial state, and cotangents of y and of the final state."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, state = normal(2, length, channels), normal(2, taps - 1, channels)
    weight, offset = normal(taps, channels), normal(channels) if bias else None
    return (x, weight, offset, state), (jnp.ones_like(x) * 0.1 + x, state * 0.5)


def with_gradients(arrays, cotangents, implementation, **options):
    """(y, final state, gradients of x, weight, bias and initial state)."""

    def run(*arrays):
        x, weight, bias, state = arrays
        return causal_conv1d(
            x,
            weight,
            bias,
            initial_state=state,
            implementation=implementation,
            **options,
        )

    def both(arrays, cotangents):
        out, pull = jax.vjp(run, *arrays)
        return *out, *pull(type(out)(*cotangents))

    return jax.jit(both)(arrays, cotangents)


def truth(arrays, cotangents, **options):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda t: jnp.asarray(t, jnp.float64), (arrays, cotangents))
        return with_gradients(*wide, "reference", **options)


def assert_close(got, expected, tolerance):
    for x, y in zip(got, expected, strict=True):
        if x is not None and x.size:  # K = 1 has no state
            x, y = np.float64(x), np.float64(y)
            assert x.shape == y.shape
            assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


@pytest.mark.parametrize(
    ("case", "packed", "activation"),
    [
        ({"channels": 130}, True, "silu"),  # neither whole channels nor whole stretches
        ({"channels": 256, "dtype": jnp.bfloat16}, True, "silu"),
        ({"channels": 128, "bias": False}, False, None),
        ({"channels": 128, "taps": 1}, True, "silu"),
        ({"channels": 128, "taps": 2, "length": 1}, False, "silu"),
    ],
)
def test_forward_and_every_gradient(case, packed, activation):
    from pallas_kernels import mosaic

    arrays, cotangents = inputs(**case)
    options = {"activation": activation, "segment_ids": SEGMENTS if packed else None}
    with mosaic.races_raise():
        got = with_gradients(arrays, cotangents, "pallas", **options)

    tolerance = BFLOAT16 if arrays[0].dtype == jnp.bfloat16 else FLOAT32
    assert_close(got, truth(arrays, cotangents, **options), tolerance)


def test_a_bad_document_spoils_no_other():
    arrays, cotangents = inputs(128)
    bad = arrays[0].at[0, 3].set(np.nan), *arrays[1:3], arrays[3]
    options = {"activation": "silu", "segment_ids": SEGMENTS}

    y, _, dx, *_ = with_gradients(bad, cotangents, "pallas", **options)
    clean, _, clean_dx, *_ = with_gradients(arrays, cotangents, "pallas", **options)

    others = np.ones((2, 17), bool)
    others[0, 3] = False
    np.testing.assert_array_equal(y[others], clean[others])
    np.testing.assert_array_equal(dx[others], clean_dx[others])
    assert np.isnan(np.asarray(y[0, 3])).all()


def test_float64_is_refused_by_name():
    with jax.enable_x64(True):
        x, weight = jnp.zeros((1, 3, 128)), jnp.zeros((2, 128))
        with pytest.raises(NotImplementedError, match="x: got float64"):
            causal_conv1d(x, weight, implementation="pallas")
