"""Clip the norm of all gradients together; the element-wise clamp is `optax.clip`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bitmamba.optim.norms import join_norms, leaf_norms


class ClipFactors(NamedTuple):
    """Clipped = gradient * first * second; both are 1 where nothing is clipped."""

    first: jax.Array
    second: jax.Array


def clip_factors(total: jax.Array, *, limit: float) -> ClipFactors:
    """What a gradient of norm `total` is scaled by so that it has at most `limit`.

    Numerics: two factors, since limit / total is zero in float32 for a huge total (and
        XLA makes gradient / total into gradient * (1 / total)). A norm and a limit
        of zero leave the zeros as they are. A norm that is not finite makes
        everything NaN: 1 / inf would be a silent update of zeros.
    """
    above = total > limit
    first = jnp.where(above & (total > 2.0**64), 2.0**-64, 1.0)
    second = jnp.where(above, limit / jnp.where(above, total * first, 1.0), 1.0)
    return ClipFactors(first, jnp.where(jnp.isfinite(total), second, jnp.nan))


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
        clipped = jax.tree.map(lambda g: g * factors.first * factors.second, updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
