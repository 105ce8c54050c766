"""The arms of a sweep, each a config; no JAX, so that mistakes are told early."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from bitmamba.config import Config
from bitmamba.config_checks import check

EXAMPLES = {"lr": "1e-4,1e-3", "wd": "0,0.01", "rank": "8,16"}


class Arm(NamedTuple):
    """One run of a sweep: what train.py would train with `config`."""

    config: Config

    @property
    def lr(self) -> float:
        """Its learning rate."""
        return self.config.optim.lr

    @property
    def weight_decay(self) -> float:
        """Its weight decay."""
        return self.config.optim.weight_decay

    @property
    def rank(self) -> int | None:
        """Its adapters' rank; None in a mode without adapters."""
        return self.config.lora.rank if self.config.train.mode == "lora" else None


def make_arms(
    config: Config,
    *,
    lr: Sequence[str] | None = None,
    wd: Sequence[str] | None = None,
    rank: Sequence[str] | None = None,
) -> tuple[Arm, ...]:
    """Every combination, by rank, then learning rate, then decay.

    Args:
        config: of the run; decides what is not listed.
        lr, wd, rank: the lists of the command line; None is not given.

    Raises:
        ValueError: nothing is listed; an empty list, a value that is no number, is
            listed twice or cannot be; ranks without adapters; cached base logits.
    """
    if lr is wd is rank is None:
        raise ValueError(
            "sweep: got nothing to vary; expected --lr, --wd or --rank, as "
            f"--lr={EXAMPLES['lr']}"
        )
    if rank is not None and config.train.mode != "lora":
        raise ValueError(
            f"--rank: got {','.join(rank)} with train.mode={config.train.mode}, which "
            "has no adapters; expected train.mode=lora; use configs/lora.py, or leave "
            "--rank out"
        )
    if config.loss.is_cached:
        raise ValueError(
            "config.loss.base_logits: got cached in a sweep; expected copy, whose arms "
            "share one base; set it to copy"
        )
    lrs = _numbers("lr", lr, float, config.optim.lr)
    decays = _numbers("wd", wd, float, config.optim.weight_decay)
    ranks = _numbers("rank", rank, int, config.lora.rank)
    arms = []
    for r, a, w in itertools.product(ranks, lrs, decays):
        arm = dataclasses.replace(
            config,
            lora=dataclasses.replace(config.lora, rank=r),
            optim=dataclasses.replace(config.optim, lr=a, weight_decay=w),
        )
        check(arm)
        arms.append(Arm(arm))
    return tuple(arms)


def _numbers(
    flag: str, texts: Sequence[str] | None, kind: type, default: Any
) -> list[Any]:
    if texts is None:
        return [default]
    example = f"as --{flag}={EXAMPLES[flag]}"
    if not texts:
        raise ValueError(f"--{flag}: got an empty list; expected numbers, {example}")
    what = "a whole number" if kind is int else "a number"
    found: list[Any] = []
    for text in texts:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(
                f"--{flag}: got {text!r}; expected {what}, {example}"
            ) from None
        if value in found:
            raise ValueError(f"--{flag}: got {text} twice; expected each value once")
        found.append(value)
    return found
