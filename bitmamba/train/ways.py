"""Ways to keep what a model knew, each a config; no JAX, so mistakes are told early."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitmamba.config import Config
from bitmamba.config_checks import check
from bitmamba.data import DataBundle
from bitmamba.data.plan import SFT


class Way(NamedTuple):
    """One run of a comparison: what train.py would train with `config`."""

    name: str
    config: Config
    data: DataBundle


def make_ways(
    config: Config,
    *,
    tmkl: Sequence[str],
    pull: Sequence[str],
    out: Path,
    read_data: Callable[[Config], DataBundle],
) -> list[Way]:
    """Plain, replay, TMKL, both and pullback; the last three for each strength.

    Those with replay take as many more steps as bring their examples nearest to the
    number of windows of examples that the others see; these are the same windows.

    Args:
        config: of all ways but for what they differ in: `data.replay_share` is that
            of the ways with replay, `loss.tmkl` and `loss.pull` are not used.
        tmkl, pull: strengths, as typed.
        out: each way works in a folder of its own in it.
        read_data: see `bitmamba.train.start`.

    Raises:
        ValueError: a strength that cannot be, or is listed twice; nothing to measure
            learning or retention on; no replay.
    """
    _check(config)
    config = _with(config, tmkl=0.0, pull=0.0)
    without = _with(config, replay_share=0.0)
    weights, pulls = _strengths("tmkl", tmkl), _strengths("pull", pull)
    pulled = [_with(without, pull=p) for p in pulls]
    with_replay, more = _as_many_examples(config, read_data)
    data = read_data(without)
    if not data.eval_sft or not data.eval_replay:
        raise ValueError(
            "forgetting: got no held-out examples or no held-out text; expected both, "
            "for learning and retention; set config.data.heldout_share and "
            "config.data.heldout_replay"
        )
    found = [("plain", without, data), ("replay", with_replay, more)]
    found += [(f"tmkl_{w:g}", _with(without, tmkl=w), data) for w in weights]
    found += [(f"replay_tmkl_{w:g}", _with(with_replay, tmkl=w), more) for w in weights]
    found += [(f"pull_{c.loss.pull:g}", c, data) for c in pulled]
    return [
        Way(name, dataclasses.replace(one, name=name, workdir=str(out / name)), data)
        for name, one, data in found
    ]


def _check(config: Config) -> None:
    if not config.data.sft or not config.data.replay or not config.data.replay_share:
        raise ValueError(
            "forgetting: got a config without examples or without replay; expected "
            "config.data.sft, config.data.replay and config.data.replay_share > 0; "
            "see configs/sft.py"
        )


def _as_many_examples(
    config: Config, read_data: Callable[[Config], DataBundle]
) -> tuple[Config, DataBundle]:
    """The config with replay and its steps, and its data."""
    a_step = config.train.batch_size * config.train.accumulation
    wanted = config.train.steps * a_step
    # Windows of replay are full, those of examples nearly so: this is enough.
    most = math.ceil(config.train.steps / (1 - config.data.replay_share)) + 1
    plan = read_data(_with(config, steps=most)).plan
    seen = np.cumsum(plan.streams == SFT)[a_step - 1 :: a_step]
    steps = int(np.abs(seen - wanted).argmin()) + 1
    found = _with(config, steps=steps)
    return found, read_data(found)


def _with(config: Config, **changes: float) -> Config:
    """A config with other values of fields of data, train or loss."""
    parts = {}
    for part in ("data", "train", "loss"):
        own = {k: v for k, v in changes.items() if hasattr(getattr(config, part), k)}
        parts[part] = dataclasses.replace(getattr(config, part), **own)
    changed = dataclasses.replace(config, **parts)
    check(changed)
    return changed


def _strengths(flag: str, texts: Sequence[str]) -> list[float]:
    found: list[float] = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"--{flag}: got {text!r}; expected numbers above 0")
        if value in found:
            raise ValueError(f"--{flag}: got {text} twice; expected each value once")
        found.append(value)
    if not found:
        raise ValueError(f"--{flag}: got an empty list; expected numbers above 0")
    return found
