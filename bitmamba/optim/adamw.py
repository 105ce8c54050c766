"""Adam's preconditioner with float32 moments; the decay is a stage of the chain."""

import jax
import jax.numpy as jnp
import optax

from bitmamba.config import AdamWConfig


def scale_by_adam(cfg: AdamWConfig) -> optax.GradientTransformation:
    """Adam's direction: mean gradient over root of mean square, both debiased.

    With t = 1, 2, …:  m ← b1·m + (1 - b1)·g;  v ← b2·v + (1 - b2)·g²;
        out = (m / (1 - b1^t)) / (√(v / (1 - b2^t)) + eps)

    Args:
        cfg: b1, b2, eps.

    Returns:
        A transformation that gives float32 updates, to be multiplied by -lr; its state
        is an `optax.ScaleByAdamState`.

    Numerics: float32 whatever the parameters are. `optax.scale_by_adam` keeps the
        second moment in the parameter's dtype; in bfloat16 it stalls (b2 = 0.999 is a
        step of 1/8 of its precision).
    Source: Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2. Differs from optax:
        only the new moments are read for the update, so that XLA overwrites the old
        ones in place instead of copying them first.
    """

    def zeros(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def init(params):
        count = jnp.zeros([], jnp.int32)
        return optax.ScaleByAdamState(count, mu=zeros(params), nu=zeros(params))

    def update(updates, state, params=None):
        del params
        g = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: cfg.b1 * m + (1 - cfg.b1) * g, state.mu, g)
        nu = jax.tree.map(lambda v, g: cfg.b2 * v + (1 - cfg.b2) * g * g, state.nu, g)
        mu, nu = jax.lax.optimization_barrier((mu, nu))
        t = count.astype(jnp.float32)
        first, second = 1 - cfg.b1**t, 1 - cfg.b2**t
        out = jax.tree.map(
            lambda m, v: (m / first) / (jnp.sqrt(v / second) + cfg.eps), mu, nu
        )
        return out, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)
