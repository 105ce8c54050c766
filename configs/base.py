"""Every setting at its default, as a ConfigDict, so that flags can override each."""

import dataclasses
import types
import typing
from typing import Any

import ml_collections
from ml_collections import config_dict

from bitmamba.config import Config, DataConfig, ModelConfig
from configs import presets


def default_config(name: str, model: str) -> ml_collections.ConfigDict:
    """All settings of `bitmamba.config.Config`, with the model of preset `model`."""
    if model not in presets.PRESETS:
        known = ", ".join(presets.PRESETS)
        raise ValueError(f"config string: got {model!r}; expected one of {known}")
    workdir = f"runs/{name}" if model == "tiny" else f"runs/{name}_{model}"
    config = Config(
        name=name,
        workdir=workdir,
        model=ModelConfig(vocab_size=1, d_model=1, layers=("mamba2",)),
        data=DataConfig(heldout_replay=("assets:data/replay_heldout.jsonl",)),
    )
    settings = _as_config_dict(config)
    settings.model = presets.get_model(model)
    return settings


def _as_config_dict(value: Any) -> ml_collections.ConfigDict:
    """A dataclass as a ConfigDict that flags can override, optional values too."""
    hints = typing.get_type_hints(type(value))
    settings = ml_collections.ConfigDict()
    for field in dataclasses.fields(value):
        item, hint = getattr(value, field.name), hints[field.name]
        if dataclasses.is_dataclass(item):
            item = _as_config_dict(item)
        elif isinstance(hint, types.UnionType):
            item = _optional(item, hint)
        elif isinstance(item, tuple):
            item = tuple(
                dataclasses.asdict(i) if dataclasses.is_dataclass(i) else i
                for i in item
            )
        settings[field.name] = item
    return settings


def _optional(item: Any, hint: types.UnionType) -> config_dict.FieldReference:
    """A field that flags can set to a value; numbers also back to None."""
    field = config_dict.placeholder(str if str in typing.get_args(hint) else object)
    field.set(item)
    return field


def group_rules(*, state_lr_mult: float = 1.0) -> tuple[dict[str, Any], ...]:
    """State parameters, norms and the rest; only the rest decays."""
    return (
        {
            "name": "state",
            "pattern": ".*/(A_log|D|dt_bias)",
            "lr_mult": state_lr_mult,
            "decay": False,
            "optional": True,
        },
        {"name": "norms", "pattern": ".*/(scale|bias)", "decay": False},
        {"name": "weights", "pattern": ".*"},
    )
