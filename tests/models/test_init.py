import jax
import numpy as np

from bitmamba.models import init

KEY = jax.random.key(0)


def test_step_sizes_are_log_uniform_after_softplus():
    bias = init.dt_bias(1e-3, 0.1, 1e-4)(KEY, (20_000,))

    dt = np.log1p(np.exp(np.asarray(bias, np.float64)))

    assert dt.min() > 0.999e-3
    assert dt.max() < 1.001e-1
    share = np.mean(dt < 1e-2)  # half of the logarithmic range
    assert abs(share - 0.5) < 0.015


def test_step_sizes_have_a_floor():
    bias = init.dt_bias(1e-6, 1e-5, 1e-4)(KEY, (100,))

    assert np.allclose(np.log1p(np.exp(np.asarray(bias, np.float64))), 1e-4, rtol=1e-3)


def test_decay_rates_are_uniform_from_1_to_16():
    A = np.exp(init.log_decay(KEY, (20_000,)))

    assert A.min() >= 1
    assert A.max() <= 16
    assert abs(A.mean() - 8.5) < 0.1


def test_projections_are_uniform_within_their_bound():
    for scale in (1.0, 0.25):
        w = np.asarray(init.projection(scale)(KEY, (100, 200)))
        bound = scale / 10

        assert np.abs(w).max() <= bound * (1 + 1e-6)
        assert abs(w.std() - bound / np.sqrt(3)) < 0.01 * bound


def test_conv_and_embedding():
    taps = np.asarray(init.conv_tap(4)(KEY, (4, 500)))
    embedding = np.asarray(init.embedding(KEY, (100, 200)))

    assert 0.49 < np.abs(taps).max() <= 0.5
    assert abs(embedding.std() - 0.02) < 5e-4
