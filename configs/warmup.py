"""Phase 1: full training on plain text; phase 2 (configs/sft.py) starts from it.

Command: python train.py --config=configs/warmup.py
Then:    python train.py --config=configs/sft.py \
             --config.checkpoint.init_from=runs/warmup
Cost and result (tiny, 2 busy CPU cores): 7 minutes; held-out text 8.41 -> 5.29 nats a
token. Phase 2 from there: held-out examples 5.59 -> 4.63, held-out text 5.29 -> 5.56.
The bundled base was made with this file, more text and more steps; the exact
command is in bitmamba/assets/README.md.
"""

import ml_collections

from configs.base import default_config, group_rules


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
    """200 steps on plain text; `preset` names the model."""
    config = default_config("warmup", preset)
    config.data.replay = ("assets:data/replay.jsonl",)
    config.data.replay_share = 0.0
    config.optim.lr = 3e-2
    config.optim.schedule = "wsd"
    config.optim.warmup_steps = 20
    config.optim.rules = group_rules()
    config.train.steps = 200
    config.eval.every = 100
    config.eval.prompts = ("The President of the United States", "Call me Ishmael.")
    return config
