"""What an update did, per group: a dict of float32 scalars, computed in the step.

Keys for each group: optim/<group>/
    lr                 its learning rate, multiplier included
    grad_norm          of the gradient as it came
    grad_norm_clipped  after the clamp and the norm clip
    update_norm        l2 norm of the update
    update_ratio       update_norm / l2 norm of the parameters (at least 1e-12)
    clamped_share      elements that the clamp changed, if there is one
    lost_share         elements that the update leaves as they were although it is not
                       zero there: rounding in the parameter's dtype took it
    eps_floor_share    elements whose step the epsilon sets, if the rule has a floor
and over everything: grad_norm, grad_norm_clipped, lr (multiplier 1).
Gradient norms are in `OptimConfig.norm`, the one that is clipped.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from bitmamba.config import OptimConfig
from bitmamba.optim.clipping import clip_factors
from bitmamba.optim.groups import Groups
from bitmamba.optim.norms import join_norms, sum_squares
from bitmamba.paths import flatten
from bitmamba.types import Params

_NO_NORM = 1e-12


def update_report(
    *,
    grads: Params,
    params: Params,
    updates: Params,
    raw_norms: Sequence[jax.Array],
    norms: Sequence[jax.Array],
    at_floor: Sequence[jax.Array] | None,
    lr: jax.Array,
    groups: Groups,
    cfg: OptimConfig,
    clamp: float | None,
) -> dict[str, jax.Array]:
    """The report above; pure and jittable.

    Args:
        grads, params, updates: trees of the same paths; params before the update.
        raw_norms, norms: leaf norms of the gradient, before and after the clamp.
        at_floor: bool array per leaf, or None without a floor.
        lr: of this update.
        groups, cfg, clamp: as in the chain; clamp None is none.

    Returns:
        {key: float32 scalar}.

    Numerics: counts are exact (float32 along one axis, then int32).
    """
    paths = list(flatten(grads))
    grads, params, updates = (
        list(flatten(tree).values()) for tree in (grads, params, updates)
    )
    scale = _clip_scale(join_norms(list(norms), norm=cfg.norm), cfg)
    shares = {"lost_share": [_lost(p, u) for p, u in zip(params, updates, strict=True)]}
    if clamp is not None:
        shares["clamped_share"] = [jnp.abs(g) > clamp for g in grads]
    if at_floor is not None:
        shares["eps_floor_share"] = list(at_floor)
    report = {
        "lr": lr,
        "grad_norm": join_norms(list(raw_norms), norm=cfg.norm),
        "grad_norm_clipped": join_norms(list(norms), norm=cfg.norm) * scale,
    }
    for i, name in enumerate(groups.names):
        chosen = [k for k, path in enumerate(paths) if groups.index[path] == i]
        if not chosen:
            continue

        def pick(values, chosen=chosen):
            return [values[k] for k in chosen]

        update_norm = _l2(pick(updates))
        figures = {
            "lr": lr * groups.rules[i].lr_mult,
            "grad_norm": join_norms(pick(raw_norms), norm=cfg.norm),
            "grad_norm_clipped": join_norms(pick(norms), norm=cfg.norm) * scale,
            "update_norm": update_norm,
            "update_ratio": update_norm / jnp.maximum(_l2(pick(params)), _NO_NORM),
        }
        figures |= {key: _share(pick(masks)) for key, masks in shares.items()}
        report |= {f"optim/{name}/{key}": value for key, value in figures.items()}
    return report


def _clip_scale(total, cfg):
    if cfg.max_norm is None:
        return 1.0
    factors = clip_factors(total, limit=cfg.max_norm)
    # Two steps, so that a huge norm leaves its limit and not zero.
    return factors.factor / factors.divisor


def _lost(param, update):
    """Where `optax.apply_updates` gives back the very parameter."""
    new = (param + update).astype(param.dtype)
    return (new == param) & (update != 0)


def _l2(leaves):
    return jnp.sqrt(sum(sum_squares(x) for x in leaves))


def _share(masks):
    counts = [_count(mask) for mask in masks]
    return sum(counts) / sum(mask.size for mask in masks)


def _count(mask):
    """True elements; float32 sums are fast but exact only up to 2^24 of them."""
    mask = mask.astype(jnp.float32)
    rows = jnp.sum(mask, axis=-1) if mask.ndim else mask
    return jnp.sum(rows.astype(jnp.int32)).astype(jnp.float32)
