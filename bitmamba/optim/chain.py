"""One optax chain in a fixed, named order, and the report that goes with each update.

clamp -> norm clip over all groups -> preconditioner -> decoupled decay -> group
multiplier -> schedule -> sign. The non-finite guard stands before it, in the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bitmamba.config import OptimConfig
from bitmamba.optim.clipping import clip_by_norm
from bitmamba.optim.groups import Groups, trainable_groups
from bitmamba.optim.narrow import kept_gradients
from bitmamba.optim.norms import leaf_norms
from bitmamba.optim.report import update_report
from bitmamba.optim.schedules import Schedule, make_schedule
from bitmamba.paths import flatten, unflatten
from bitmamba.types import Array, Params


class Preconditioner(NamedTuple):
    """What an entry of TRANSFORMS makes.

    transform: gradient -> direction, before decay, multipliers and schedule.
    at_floor: (state after the update, params) -> tree of bool arrays, true where the
        epsilon sets the step; None if the rule has no floor.
    """

    transform: optax.GradientTransformation
    at_floor: Callable[[Any, Params], Any] | None = None


class Hyper(NamedTuple):
    """What a compiled update reads at run time: () float32 each, or arrays of arms.

    One program so serves every value, and runs that differ in these alone are equal
    to the bit however they are compiled.
    """

    lr: Array
    weight_decay: Array


def hyper(cfg: OptimConfig) -> Hyper:
    """The values of a config."""
    return Hyper(jnp.float32(cfg.lr), jnp.float32(cfg.weight_decay))


class Optimizer(NamedTuple):
    """An optax transformation that also reports; init and update are jittable.

    init(trainable) -> state: a dict, by stage of the chain.
    update(grads, state, params, hyper=None) -> (updates, state, report); report:
        float32 scalars, see `bitmamba.optim.report`. `optax.apply_updates` adds the
        updates. hyper: Hyper; None takes the config's as constants of the program.
    transform: the same chain without the report.
    schedule: updates made so far -> learning rate of the next one.
    groups: which rule decides for which trainable parameter.
    """

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Any, Any, dict[str, jax.Array]]]
    transform: optax.GradientTransformationExtraArgs
    schedule: Schedule
    groups: Groups


def build_optimizer(
    cfg: OptimConfig,
    trainable: Params,
    *,
    make_preconditioner: Callable[[OptimConfig, Schedule], Preconditioner],
    steps: int,
    clamp_allowed: bool = True,
) -> Optimizer:
    """`bitmamba.optim.make_optimizer`, with the preconditioner already looked up."""
    schedule = make_schedule(cfg, steps=steps)
    groups = trainable_groups(cfg.rules, trainable)
    clamp = cfg.clamp if clamp_allowed else None
    preconditioner = make_preconditioner(cfg, schedule)
    chain = optax.named_chain(
        ("float32", optax.stateless(lambda updates, _: _float32(updates))),
        ("clamp", optax.identity() if clamp is None else optax.clip(clamp)),
        (
            "norm_clip",
            optax.identity()
            if cfg.max_norm is None
            else clip_by_norm(cfg.max_norm, norm=cfg.norm),
        ),
        ("precondition", preconditioner.transform),
        ("decay", add_decay(cfg.weight_decay, groups=groups)),
        ("groups", scale_by_group(groups)),
        ("schedule", scale_by_rate(schedule)),
        ("sign", optax.scale(-1.0)),
    )

    def update(grads, state, params, hyper: Hyper | None = None):
        # Cast where they are read: passed on as float32 they would be held so.
        raw = leaf_norms(grads, norm=cfg.norm)
        norms = raw if clamp is None else leaf_norms(grads, norm=cfg.norm, clamp=clamp)
        count = state["schedule"].count
        rate = schedule(count) if hyper is None else schedule(count, lr=hyper.lr)
        given = {} if hyper is None else {"rate": rate, "hyper": hyper}
        updates, new_state = chain.update(grads, state, params, norms=norms, **given)
        if cfg.gradient_dtype != "float32":
            # All are held until the report is made, so in no more than gradients were.
            updates = kept_gradients(updates, dtype=cfg.gradient_dtype)
            updates = jax.lax.optimization_barrier(updates)
        at_floor = preconditioner.at_floor
        report = update_report(
            grads=grads,
            params=params,
            updates=updates,
            raw_norms=raw,
            norms=norms,
            at_floor=at_floor and at_floor(new_state["precondition"], params),
            lr=rate,
            groups=groups,
            cfg=cfg,
            clamp=clamp,
        )
        return updates, new_state, report

    return Optimizer(
        init=chain.init,
        update=update,
        transform=chain,
        schedule=schedule,
        groups=groups,
    )


def add_decay(
    weight_decay: float, *, groups: Groups
) -> optax.GradientTransformationExtraArgs:
    """Add weight_decay·θ where the group decays; times lr later, as AdamW does.

    Its update takes `hyper=`, whose weight_decay then counts instead.
    Under Adafactor this is PyTorch's θ·(1 - lr·weight_decay), not capped by 1/√t.
    """

    def update(updates, state, params=None, *, hyper: Hyper | None = None, **extra):
        del extra
        factor = weight_decay if hyper is None else hyper.weight_decay

        def add(path, update, param):
            if not groups.rule(path).decay:
                return update
            return update + factor * param.astype(jnp.float32)

        if hyper is None and weight_decay == 0.0:
            return updates, state
        return _by_path(add, updates, params), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_rate(schedule: Schedule) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_schedule`; its update takes `rate=`, this update's, if known."""
    plain = optax.scale_by_schedule(schedule)

    def update(updates, state, params=None, *, rate=None, **extra):
        del params, extra
        if rate is None:
            rate = schedule(state.count)
        scaled = jax.tree.map(lambda u: jnp.asarray(rate, u.dtype) * u, updates)
        return scaled, state._replace(count=optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(plain.init, update)


def scale_by_group(groups: Groups) -> optax.GradientTransformation:
    """Multiply by the group's lr_mult; earlier a preconditioner would cancel it."""

    def scale(path, update):
        lr_mult = groups.rule(path).lr_mult
        return update if lr_mult == 1.0 else update * lr_mult

    return optax.stateless(lambda updates, _: _by_path(scale, updates))


def chain_hints(
    cfg: OptimConfig, *, steps: int, clamp_allowed: bool = True
) -> list[str]:
    """Settings that are allowed but do not do what one may think; one line each."""
    hints = []
    clamp = cfg.clamp if clamp_allowed else None
    if cfg.clamp is not None and not clamp_allowed:
        hints.append(f"optim.clamp={cfg.clamp:g} is not used in this mode")
    both = clamp is not None and cfg.max_norm is not None
    if both and cfg.norm == "inf" and cfg.max_norm >= clamp:
        hints.append(
            f"optim.max_norm={cfg.max_norm:g} with norm=inf never fires: after "
            f"optim.clamp={clamp:g} no element is larger than that"
        )
    if cfg.warmup_steps >= steps:
        hints.append(
            f"optim.warmup_steps={cfg.warmup_steps} of {steps} steps: the schedule "
            "after the warm-up is never reached"
        )
    relative = cfg.name == "adafactor" and cfg.adafactor.relative_step
    if relative and cfg.lr > steps**-0.5:
        hints.append(
            f"optim.lr={cfg.lr:g} is more than 1/sqrt(steps)={steps**-0.5:.3g}: "
            "Adafactor's relative step caps it; "
            "optim.adafactor.relative_step=False does not"
        )
    return hints


def _float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _by_path(function, first, *rest):
    """Map function(path, leaf, …) over trees of dicts with the same paths."""
    flat = [flatten(tree) for tree in rest]
    return unflatten(
        {p: function(p, x, *(f[p] for f in flat)) for p, x in flatten(first).items()}
    )
