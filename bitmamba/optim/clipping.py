"""Clip the norm of all gradients together; the element-wise clamp is `optax.clip`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bitmamba.optim.norms import join_norms, leaf_norms


class ClipFactors(NamedTuple):
    """Clipped = gradient / divisor * factor; both are 1 where nothing is clipped."""

    divisor: jax.Array
    factor: jax.Array


def clip_factors(total: jax.Array, *, limit: float) -> ClipFactors:
    """What a gradient of norm `total` is scaled by so that it has at most `limit`.

    Numerics: a division and a product, since limit / total can underflow; a norm
        and a limit of zero leave the zeros as they are. A norm that is not finite
        makes everything NaN: 1 / inf would be a silent update of zeros.
    """
    above = total > limit
    factor = jnp.where(above, limit, 1.0)
    return ClipFactors(
        divisor=jnp.where(above, total, 1.0),
        factor=jnp.where(jnp.isfinite(total), factor, jnp.nan),
    )


def clip_by_norm(
    limit: float, *, norm: str = "l2"
) -> optax.GradientTransformationExtraArgs:
    """Scale all gradients by one factor so that their joint norm is at most `limit`.

    Args:
        limit: the largest norm let through.
        norm: "l2" or "inf" (the largest magnitude).

    Returns:
        A stateless transformation. Its update takes `norms=`, the leaf norms of the
        very gradients it gets, if the caller has them; otherwise it computes them.

    Source: as optax.clip_by_global_norm, which turns [1e20, 1, 2] into zeros, and
        zero over zero into NaN.
    """

    def update(updates, state, params=None, *, norms=None, **extra):
        del params, extra
        norms = leaf_norms(updates, norm=norm) if norms is None else norms
        factors = clip_factors(join_norms(norms, norm=norm), limit=limit)
        clipped = jax.tree.map(lambda g: g / factors.divisor * factors.factor, updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
