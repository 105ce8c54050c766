"""Every setting at its default, as a ConfigDict, so that flags can override each."""

from typing import Any

import ml_collections

from bitmamba.config import Config, DataConfig
from configs import presets
from configs.overridable import as_config_dict


def default_config(name: str, model: str) -> ml_collections.ConfigDict:
    """All settings of `bitmamba.config.Config`, with the model of preset `model`."""
    workdir = f"runs/{name}" if model == "tiny" else f"runs/{name}_{model}"
    config = Config(
        name=name,
        workdir=workdir,
        model=presets.get_model(model),
        data=DataConfig(heldout_replay=("assets:data/replay_heldout.jsonl",)),
    )
    return as_config_dict(config)


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


def adapter_rules() -> tuple[dict[str, Any], ...]:
    """Adapters, and what `config.lora.train` adds; only the factors decay."""
    return (
        {"name": "adapters", "pattern": ".*/[ab]", "optional": True},
        {"name": "direct", "pattern": ".*", "decay": False, "optional": True},
    )
