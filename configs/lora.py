"""LoRA: adapters on a frozen base, with replay against forgetting.

Command: python train.py --config=configs/lora.py
Presets: --config=configs/lora.py:NAME[,RECIPE]; NAME of configs/presets.py (default
    tiny), RECIPE "default" or "careful" (rank 16, context 4096, batch 1, gradient clip
    1.0, lr 1e-6, weight decay 0.01: what hardly moves, and hardly forgets).
Cost and result of the default (tiny, 2 CPU cores): README.md.
"""

import ml_collections

from configs import sft
from configs.base import adapter_rules


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
    """SFT of adapters; `preset` names the model and, after a comma, the recipe."""
    model, _, recipe = preset.partition(",")
    if recipe not in ("", "default", "careful"):
        raise ValueError(
            f"configs/lora.py: recipe: got {recipe!r}; expected default or careful"
        )
    config = sft.get_config(model or "tiny")
    config.name = "lora"
    config.workdir = config.workdir.replace("runs/sft", "runs/lora")
    config.train.mode = "lora"
    # Every projection of every layer: few parameters, and no kind of layer left out.
    config.lora.place = ("all",)
    # 16 serves a few thousand examples; alpha = 2·rank keeps steps of the usual size.
    config.lora.rank = 16
    config.lora.alpha = 32.0
    # Adam, because adapters are small: its two moments cost little here, and it needs
    # no size of a parameter, which a zero-initialised factor does not have.
    config.optim.name = "adamw"
    config.optim.lr = 3e-3
    config.optim.schedule = "cosine"
    config.optim.clamp = None
    config.optim.norm = "l2"
    config.optim.max_norm = 1.0
    config.optim.weight_decay = 0.0
    config.optim.rules = adapter_rules()
    # Half of what is forgotten without it, nothing lost on examples, 1.36 of the time
    # of a step (bitmamba/losses/README.md); 0 switches it off.
    config.loss.tmkl = 0.5
    if recipe == "careful":
        _careful(config)
    return config


def _careful(config: ml_collections.ConfigDict) -> None:
    config.data.window = 4096
    config.train.batch_size = 1
    config.optim.lr = 1e-6
    config.optim.schedule = "constant"
    config.optim.weight_decay = 0.01
    config.loss.tmkl = 0.0
