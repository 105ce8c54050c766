"""What to do about bad numbers: pure decisions; `rollback.py` carries them out.

The step itself skips the update of a bad step (`step.py`, `spike.py`). Here is what
follows from several in a row, or from a held-out loss that is not finite.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bitmamba.config import GuardConfig

GO_ON, ROLL_BACK, STOP = "go on", "roll back", "stop"


class Counts(NamedTuple):
    """What a run remembers of its roll-backs; it lies in every checkpoint.

    rollbacks: in the whole run. lr_scale: what they left of the learning rate.
    """

    rollbacks: int = 0
    lr_scale: float = 1.0


def decide(
    bad_in_row: int, counts: Counts, *, max_bad_steps: int, cfg: GuardConfig
) -> str:
    """GO_ON (with the next data, the update was skipped), ROLL_BACK or STOP."""
    if bad_in_row < max_bad_steps:
        return GO_ON
    return ROLL_BACK if counts.rollbacks < cfg.max_rollbacks else STOP


def rolled_back(counts: Counts, cfg: GuardConfig) -> Counts:
    """After one more roll-back."""
    return Counts(counts.rollbacks + 1, counts.lr_scale * cfg.lr_cut)


def cause(metrics: Mapping[str, Any], leaves: Sequence[str]) -> str | None:
    """What was bad about a step, in words; None if nothing was.

    Args:
        metrics: of the step, on the host.
        leaves: paths of what trains, in the order of `leaf_is_finite`.
    """
    if metrics["is_good"]:
        return None
    fine = zip(leaves, metrics["leaf_is_finite"], strict=True)
    bad = [path for path, is_finite in fine if not is_finite]
    if bad:
        return f"gradient of {bad[0]} ({len(bad)} in all) is not finite"
    if not math.isfinite(metrics["loss"]):
        return "loss is not finite"
    if not math.isfinite(metrics.get("divergence", 0.0)):
        return "divergence from the base is not finite"
    if not metrics["update_is_finite"]:
        return "with finite gradients the update is not finite"
    return (
        f"loss {float(metrics['loss']):.4f} is a spike, above "
        f"{float(metrics['spike_limit']):.4f}"
    )


def rule(cfg: GuardConfig, *, max_bad_steps: int) -> str:
    """The rule in words, for the console."""
    spike = (
        f" or its loss is above the mean of the last good ones by {cfg.spike_sigmas:g} "
        f"deviations and {cfg.spike_rise:g}"
        if cfg.spike_sigmas
        else ""
    )
    return (
        f"guard: the update of a step is skipped when a number is not finite{spike}; "
        f"after {max_bad_steps} in a row back to the last good checkpoint and on at "
        f"{cfg.lr_cut:g} of the learning rate, {cfg.max_rollbacks} times at most"
    )
