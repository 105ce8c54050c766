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
Gradient norms are in `OptimConfig.norm`, the one that is clipped. Norms and
clamped_share are of all elements; lost_share and eps_floor_share of a leaf with more
than 2^16 elements are those of evenly spaced rows with about as many.
"""

import jax
import jax.numpy as jnp

from bitmamba.config import OptimConfig
from bitmamba.optim.clipping import clip_factors
from bitmamba.optim.groups import Groups
from bitmamba.optim.norms import join_norms, sum_squares
from bitmamba.paths import flatten
from bitmamba.types import Params

_NO_NORM = 1e-12
_SMALL_LEAF = 2**14
_SAMPLE = 2**16


def update_report(
    *,
    grads: Params,
    params: Params,
    updates: Params,
    raw_norms: Params,
    norms: Params,
    at_floor: Params | None,
    lr: jax.Array,
    groups: Groups,
    cfg: OptimConfig,
    clamp: float | None,
) -> dict[str, jax.Array]:
    """The report above; pure and jittable.

    Args:
        grads, params, updates: trees of the same paths; params before the update.
        raw_norms, norms: same paths, leaf norms of the gradient before and after
            the clamp.
        at_floor: same paths, bool arrays; None without a floor.
        lr: of this update.
        groups, cfg, clamp: as in the chain; clamp None is none.

    Returns:
        {key: float32 scalar}.

    Numerics: counts are exact (float32 along one axis, then int32).
    """
    grads, params, updates, raw_norms, norms = (
        flatten(tree) for tree in (grads, params, updates, raw_norms, norms)
    )
    at_floor = at_floor and flatten(at_floor)

    def gradient_norms(paths):
        before = join_norms([raw_norms[p] for p in paths], norm=cfg.norm)
        after = join_norms([norms[p] for p in paths], norm=cfg.norm)
        if cfg.max_norm is not None:
            factors = clip_factors(total, limit=cfg.max_norm)
            after = after * factors.first * factors.second
        return {"grad_norm": before, "grad_norm_clipped": after}

    total = join_norms(norms, norm=cfg.norm)
    report = {"lr": lr} | gradient_norms(list(grads))
    for i, name in enumerate(groups.names):
        paths = [p for p in grads if groups.index[p] == i]
        if not paths:
            continue
        bins = _bins(params, paths)
        here, updates_here = _gather(params, bins), _gather(updates, bins)
        sizes = [x.size for x in here]
        lost = [
            _lost(_rows(p), _rows(u)) for p, u in zip(here, updates_here, strict=True)
        ]
        update_norm = _l2(updates_here)
        figures = {
            "lr": lr * groups.rules[i].lr_mult,
            **gradient_norms(paths),
            "update_norm": update_norm,
            "update_ratio": update_norm / jnp.maximum(_l2(here), _NO_NORM),
            "lost_share": _share(lost, sizes),
        }
        if clamp is not None:
            figures["clamped_share"] = _clamped_share(
                [grads[p] for p in paths], [raw_norms[p] for p in paths], clamp=clamp
            )
        if at_floor is not None:
            floor = [_rows(mask) for mask in _gather(at_floor, bins)]
            figures["eps_floor_share"] = _share(floor, sizes)
        report |= {f"optim/{name}/{key}": value for key, value in figures.items()}
    return report


def _bins(params, paths):
    """Large leaves alone, small ones of one dtype together: less to compile and run."""
    bins = {}
    for p in paths:
        small = params[p].size <= _SMALL_LEAF
        bins.setdefault(params[p].dtype if small else p, []).append(p)
    return list(bins.values())


def _gather(flat, bins):
    return [
        flat[paths[0]]
        if len(paths) == 1
        else jnp.concatenate([flat[p].ravel() for p in paths])
        for paths in bins
    ]


def _clamped_share(grads, norms, *, clamp):
    """Counted only where a norm says that some element may be beyond the clamp."""

    def count(grads):
        beyond = sum(_count(jnp.abs(g.astype(jnp.float32)) > clamp) for g in grads)
        return beyond / sum(g.size for g in grads)

    some = jnp.any(jnp.stack(norms) > clamp)
    return jax.lax.cond(some, count, lambda _: jnp.float32(0.0), grads)


def _lost(param, update):
    """Where `optax.apply_updates` gives back the very parameter."""
    new = (param + update).astype(param.dtype)
    return (new == param) & (update != 0)


def _l2(leaves):
    return jnp.sqrt(sum(sum_squares(x) for x in leaves))


def _rows(x):
    """Evenly spaced rows with about _SAMPLE elements; a full pass costs too much."""
    return x[:: min(x.size // _SAMPLE, x.shape[0])] if x.size > _SAMPLE else x


def _share(masks, sizes):
    """Of all elements, from the masks of all or of some rows of each leaf."""
    shares = [_count(m) / m.size * n for m, n in zip(masks, sizes, strict=True)]
    return sum(shares) / sum(sizes)


def _count(mask):
    """True elements; float32 sums are fast but exact only up to 2^24 of them."""
    mask = mask.astype(jnp.float32)
    rows = jnp.sum(mask, axis=-1) if mask.ndim else mask
    return jnp.sum(rows.astype(jnp.int32)).astype(jnp.float32)
