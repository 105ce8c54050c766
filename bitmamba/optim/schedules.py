"""Learning rates as functions of the update count; micro-batches never count."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bitmamba.config import OptimConfig

Schedule = Callable[..., jax.Array]


def _constant(k, *, start, end, final):
    return jnp.ones_like(k)


def _linear(k, *, start, end, final):
    progress = jnp.clip((k - start) / max(end - start, 1), 0.0, 1.0)
    return final + (1.0 - final) * (1.0 - progress)


def _cosine(k, *, start, end, final):
    progress = jnp.clip((k - start) / max(end - start, 1), 0.0, 1.0)
    return final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(math.pi * progress))


SHAPES = {"constant": _constant, "cosine": _cosine, "linear": _linear, "wsd": _linear}


def make_schedule(cfg: OptimConfig, *, steps: int) -> Schedule:
    """Warm-up, then the shape `cfg.schedule`.

    Update number k = 1, 2, … has the rate lr·min(1, k/warmup_steps)·shape(k): the
    first update is not wasted on a rate of zero, number `warmup_steps` has the full
    rate, and number `steps` has lr·final_lr_share, unless the shape is "constant".
    "wsd" stays at lr and falls linearly over the last decay_share·steps updates
    (at least one).

    Args:
        cfg: reads lr, schedule, warmup_steps, decay_share and final_lr_share.
        steps: updates in the whole run.

    Returns:
        schedule(count, lr=cfg.lr) -> float32 scalar, where count is the number of
        updates made before this one, as optax counts: schedule(0) is the rate of the
        first. lr may be traced.

    Raises:
        ValueError: unknown schedule.
    """
    if cfg.schedule not in SHAPES:
        raise ValueError(
            f"optim.schedule: got {cfg.schedule!r}; expected one of {sorted(SHAPES)}"
        )
    shape = SHAPES[cfg.schedule]
    start = cfg.warmup_steps
    if cfg.schedule == "wsd":
        start = max(start, steps - max(1, round(cfg.decay_share * steps)))

    def schedule(count, lr=cfg.lr):
        k = jnp.asarray(count, jnp.float32) + 1.0
        warm = jnp.minimum(1.0, k / cfg.warmup_steps) if cfg.warmup_steps else 1.0
        share = shape(k, start=start, end=steps, final=cfg.final_lr_share)
        return lr * warm * share

    return schedule
