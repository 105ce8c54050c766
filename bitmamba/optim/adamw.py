"""Adam's preconditioner with float32 moments; the decay is a stage of the chain."""

import jax
import jax.numpy as jnp
import optax

from bitmamba.config import AdamWConfig


def scale_by_adam(cfg: AdamWConfig) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, both moments float32 whatever the parameters are.

    Args:
        cfg: b1, b2, eps.

    Returns:
        A transformation that gives float32 updates, to be multiplied by -lr.

    Numerics: optax keeps the second moment in the parameter's dtype; in bfloat16 it
        stalls (b2 = 0.999 is a step of 1/8 of its precision).
    Source: Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2.
    """
    inner = optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)

    def float32(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params):
        return inner.init(float32(params))

    def update(updates, state, params=None):
        del params
        return inner.update(float32(updates), state)

    return optax.GradientTransformation(init, update)
