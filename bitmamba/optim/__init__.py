"""The optimiser: one chain in a fixed order, per-group rules, and a report.

A new preconditioner is a file and a line in TRANSFORMS.
"""

from collections.abc import Callable
from functools import partial

from bitmamba.config import OptimConfig
from bitmamba.optim.adafactor import at_floor, scale_by_adafactor
from bitmamba.optim.adamw import scale_by_adam
from bitmamba.optim.chain import (
    Hyper,
    Optimizer,
    Preconditioner,
    build_optimizer,
    chain_hints,
    hyper,
)
from bitmamba.optim.groups import (
    GroupRow,
    Groups,
    assign_groups,
    group_table,
    split_frozen,
)
from bitmamba.optim.narrow import add_rounded, kept_gradients
from bitmamba.optim.schedules import Schedule, make_schedule
from bitmamba.types import Params

__all__ = [
    "TRANSFORMS",
    "GroupRow",
    "Groups",
    "Hyper",
    "Optimizer",
    "Preconditioner",
    "add_rounded",
    "assign_groups",
    "chain_hints",
    "group_table",
    "hyper",
    "kept_gradients",
    "make_optimizer",
    "make_schedule",
    "split_frozen",
]


IsScaled = Callable[[str], bool]


def _adafactor(
    cfg: OptimConfig, schedule: Schedule, is_scaled: IsScaled
) -> Preconditioner:
    def floor(state, params):
        return at_floor(state, params, cfg=cfg.adafactor)

    return Preconditioner(
        transform=scale_by_adafactor(
            cfg.adafactor, schedule=schedule, is_scaled=is_scaled
        ),
        at_floor=floor if cfg.adafactor.rule == "torch" else None,
    )


def _adamw(cfg: OptimConfig, schedule: Schedule, is_scaled: IsScaled) -> Preconditioner:
    del schedule, is_scaled
    return Preconditioner(transform=scale_by_adam(cfg.adamw))


TRANSFORMS: dict[str, Callable[[OptimConfig, Schedule, IsScaled], Preconditioner]] = {
    "adafactor": _adafactor,
    "adamw": _adamw,
}


def make_optimizer(
    cfg: OptimConfig,
    trainable: Params,
    *,
    steps: int,
    clamp_allowed: bool = True,
    is_scaled: IsScaled = lambda path: True,
) -> Optimizer:
    """The whole optimiser: clamp, norm clip, preconditioner, decay, rules, schedule.

    Args:
        cfg: everything it depends on.
        trainable: tree of the parameters that train, or of their shapes; see
            `split_frozen`. Frozen parameters have no state.
        steps: updates in the whole run, for the schedule.
        clamp_allowed: False leaves `cfg.clamp` out (head-only training).
        is_scaled: paths whose step Adafactor scales by the parameter's size.

    Returns:
        Optimizer; `updates, state, report = optimizer.update(grads, state, params)`.

    Raises:
        ValueError: an unknown name, a parameter without a rule, nothing to train.

    Numerics: gradients become float32 first; states and updates are float32, but
        updates of matrices of `cfg.gradient_dtype`. Adding an update rounds once, to
        the parameter's dtype.
    """
    if cfg.name not in TRANSFORMS:
        raise ValueError(
            f"optim.name: got {cfg.name!r}; expected one of {sorted(TRANSFORMS)}"
        )
    return build_optimizer(
        cfg,
        trainable,
        make_preconditioner=partial(TRANSFORMS[cfg.name], is_scaled=is_scaled),
        steps=steps,
        clamp_allowed=clamp_allowed,
    )
