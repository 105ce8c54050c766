"""Initialisers of the field; each takes (key, shape, dtype), as Flax wants them.

Projections: kaiming-uniform with a = sqrt(5), that is U(±1 / sqrt(fan_in)), the
default of the PyTorch implementations; those that write into the residual stream are
divided by sqrt(n_layers). Source: state-spaces/mamba, modules/mamba2.py and
models/mixer_seq_simple.py (`_init_weights`, n_residuals_per_layer = 1).
"""

import jax
import jax.numpy as jnp

Initializer = jax.nn.initializers.Initializer

embedding = jax.nn.initializers.normal(0.02)


def projection(scale: float = 1.0) -> Initializer:
    """U(±scale / sqrt(fan_in)) for a (fan_in, fan_out) kernel."""
    return jax.nn.initializers.variance_scaling(scale**2 / 3, "fan_in", "uniform")


def conv_tap(n_taps: int) -> Initializer:
    """U(±1 / sqrt(K)): a depthwise filter's fan-in is its width; for its bias too."""
    bound = n_taps**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def dt_bias(dt_min: float, dt_max: float, floor: float) -> Initializer:
    """softplus⁻¹(dt) for dt log-uniform in [dt_min, dt_max], at least `floor`."""

    def init(key, shape, dtype=jnp.float32):
        low, high = jnp.log(dt_min), jnp.log(dt_max)
        dt = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
        dt = jnp.maximum(dt, floor)
        return dt + jnp.log(-jnp.expm1(-dt))

    return init


def log_decay(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """A_log = log U(1, 16)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
