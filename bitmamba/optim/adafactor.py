"""Adafactor by PyTorch's rule, float32 statistics, as an optax transformation."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bitmamba.config import AdafactorConfig
from bitmamba.optim.norms import rms

RULES = ("torch", "optax")
_TINY = float(jnp.finfo(jnp.float32).tiny)


class AdafactorState(NamedTuple):
    """Statistics of the squared gradient; at each parameter's path a dict.

    count: int32, updates made.
    stats: {"row": (…, n, 1), "col": (…, 1, m)} for more than one axis, else
        {"full": the parameter's shape}; all float32.
    """

    count: jax.Array
    stats: Any


def scale_by_adafactor(
    cfg: AdafactorConfig,
    *,
    schedule: Callable[[jax.Array], jax.Array],
    is_scaled: Callable[[str], bool] = lambda path: True,
) -> optax.GradientTransformationExtraArgs:
    """Precondition by a factored second moment; the caller multiplies by lr and -1.

    With t = 1, 2, … and beta2 = 1 - t^-0.8, all in float32:
        R, C = running means of G² over the last and the last but one axis
        V    = R·C / max(mean R, eps1)          (one axis or none: V is kept whole)
        U    = G / max(√V, eps1)                U ← U / max(1, rms(U) / clip_threshold)
        out  = max(eps2, rms(θ)) · min(1, 1 / (lr_t·√t)) · U
    so that lr_t · out is PyTorch's step max(eps2, rms(θ)) · min(lr_t, 1/√t) · U.
    The cap 1/√t acts on the schedule's lr_t alone: what multiplies later in the chain
    (a group's lr_mult) multiplies the capped step, and weight decay is not capped.
    PyTorch with lr·lr_mult as a group's lr would cap the product instead; the two
    differ only where lr_mult·lr_t > 1/√t.

    Rule "optax" adds eps1 to G² instead and has no floor: U = G / √V.

    Args:
        cfg: rule, eps1 (None: finfo(parameter dtype).eps, or 1e-30 under "optax"),
            eps2, clip_threshold, beta2_decay (0.8), scale_parameter (False: no
            max(eps2, rms(θ))), relative_step (False: no cap).
        schedule: count -> lr_t, read by the cap only.
        is_scaled: paths with max(eps2, rms(θ)). Parameters that start at zero by
            design, as adapters do, have no size that could tell how far to go.

    Returns:
        A transformation whose update needs `params` and gives float32 updates. It
        takes `rate=`, lr_t of this update, instead of the schedule's.

    Raises:
        ValueError: unknown rule.

    Numerics: √V is formed as √R·√C / √max(mean R, eps1), and the floor is put under
        √V. PyTorch puts eps1² under V; with eps1 = 1e-30 that is 1e-60, zero in
        float32, so that a zero row of the gradient gives 0·rsqrt(0) = NaN there. Here
        every zero gradient gives a zero update, with any eps1 (0 counts as 1.2e-38).
        Statistics and arithmetic stay float32 whatever the parameters are.
    Source: torch.optim.Adafactor 2.13.0 (Shazeer & Stern 2018, arXiv:1804.04235).
        Differs: the floor as above; finfo of each parameter, not of the first one of
        a group; float32 where PyTorch rounds each operation to bf16.
    """
    if cfg.rule not in RULES:
        raise ValueError(
            f"optim.adafactor.rule: got {cfg.rule!r}; expected one of {list(RULES)}"
        )

    def init(params):
        return AdafactorState(
            count=jnp.zeros([], jnp.int32), stats=jax.tree.map(_init_stats, params)
        )

    def update(updates, state, params=None, *, rate=None, **extra):
        del extra
        if params is None:
            raise ValueError(
                "adafactor: params: got None; expected the parameters, which set the "
                "step; call update(updates, state, params)"
            )
        t = state.count.astype(jnp.float32) + 1.0
        cap = 1.0
        if cfg.relative_step:
            # Written so that lr_t = 0 divides nothing by zero.
            lr_t = schedule(state.count) if rate is None else rate
            cap = 1.0 / jnp.maximum(1.0, lr_t * jnp.sqrt(t))
        one = partial(_update_leaf, new_weight=t**-cfg.beta2_decay, cap=cap, cfg=cfg)
        leaves, treedef = jax.tree.flatten_with_path(updates)
        rest = (treedef.flatten_up_to(tree) for tree in (state.stats, params))
        pairs = [
            one(g, stats, p, scaled=cfg.scale_parameter and is_scaled(_name(path)))
            for (path, g), stats, p in zip(leaves, *rest, strict=True)
        ]
        out, stats = (treedef.unflatten(part) for part in zip(*pairs, strict=True))
        return out, AdafactorState(count=optax.safe_increment(state.count), stats=stats)

    return optax.GradientTransformationExtraArgs(init, update)


def at_floor(state: AdafactorState, params: Any, *, cfg: AdafactorConfig) -> Any:
    """Where √V < eps1, so that eps1 sets the step: a bool array for each parameter.

    `state` is the state after the update; only rule "torch" has a floor.
    """
    leaves, treedef = jax.tree.flatten(params)
    stats = treedef.flatten_up_to(state.stats)
    floors = [_eps1(cfg, p.dtype) for p in leaves]
    return treedef.unflatten(
        [_root_variance(s, eps1=e) < e for s, e in zip(stats, floors, strict=True)]
    )


def _eps1(cfg: AdafactorConfig, dtype: Any) -> float:
    if cfg.eps1 is None:
        return float(jnp.finfo(dtype).eps) if cfg.rule == "torch" else 1e-30
    return max(cfg.eps1, _TINY)


def _init_stats(p: jax.Array) -> dict[str, jax.Array]:
    if p.ndim < 2:
        return {"full": jnp.zeros(p.shape, jnp.float32)}
    return {
        "row": jnp.zeros((*p.shape[:-1], 1), jnp.float32),
        "col": jnp.zeros((*p.shape[:-2], 1, p.shape[-1]), jnp.float32),
    }


def _new_stats(g, stats, *, new_weight, added):
    """stats + new_weight·(mean of g² - stats); `added` goes onto g²."""
    if "full" in stats:
        means = {"full": jnp.square(g) + added}
    else:
        means = {
            "row": jnp.mean(jnp.square(g), -1, keepdims=True) + added,
            "col": jnp.mean(jnp.square(g), -2, keepdims=True) + added,
        }
    return {k: old + new_weight * (means[k] - old) for k, old in stats.items()}


def _root_variance(stats, *, eps1):
    """√V. A product of roots: R·C itself underflows at gradients of 1e-10."""
    if "full" in stats:
        return jnp.sqrt(stats["full"])
    mean = jnp.maximum(jnp.mean(stats["row"], -2, keepdims=True), eps1)
    return jnp.sqrt(stats["row"]) / jnp.sqrt(mean) * jnp.sqrt(stats["col"])


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _update_leaf(g, stats, p, *, new_weight, cap, cfg, scaled):
    g = g.astype(jnp.float32)
    eps1 = _eps1(cfg, p.dtype)
    torch_rule = cfg.rule == "torch"
    stats = _new_stats(
        g, stats, new_weight=new_weight, added=0.0 if torch_rule else eps1
    )
    floor = eps1 if torch_rule else _TINY
    u = g / jnp.maximum(_root_variance(stats, eps1=eps1), floor)
    step = cap / jnp.maximum(1.0, rms(u) / cfg.clip_threshold)
    if scaled:
        step = step * jnp.maximum(cfg.eps2, rms(p))
    return u * step, stats
