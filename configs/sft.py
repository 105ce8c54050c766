"""Supervised fine-tuning of a ternary hybrid on bundled real examples.

Command: python train.py --config=configs/sft.py
Presets: --config=configs/sft.py:NAME with NAME one of configs/presets.py, as
    bitmamba2_255m or student_1b4; those start from scratch unless
    --config.checkpoint.init_from names a checkpoint, and need --config.data.tokenizer.
Cost and result of the default (tiny, 4.4 M parameters, 2 CPU cores): README.md.
"""

import ml_collections

from configs.base import default_config, group_rules


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
    """SFT with 9:1 replay; `preset` names the model."""
    config = default_config("sft", preset)
    config.data.sft = (
        "assets:data/sft_prompt_response.jsonl",
        "assets:data/sft_scored.jsonl",
        "assets:data/sft_thought_answer.jsonl",
    )
    config.data.min_score = 0.6
    config.data.replay = ("assets:data/replay.jsonl",)
    config.optim.rules = group_rules()
    config.eval.prompts = (
        'What does the hacker term "core dump" mean?',
        "Which president gave the State of the Union address of 1862?",
        "What is the capital of France?",
    )
    if preset == "tiny":
        config.checkpoint.init_from = "assets:base"
        config.optim.lr = 1e-2
        config.train.steps = 100
        config.eval.every = 25
    else:
        _large(config)
    return config


def _large(config: ml_collections.ConfigDict) -> None:
    """The recipe of the 1.4 B student: Adafactor, clamp, state parameters at 50 x."""
    config.optim.lr = 3e-5
    config.optim.schedule = "constant"
    config.optim.clamp = 1.0
    config.optim.norm = "inf"
    config.optim.rules = group_rules(state_lr_mult=50.0)
    config.model.remat = True
    config.data.window = 1024
    config.train.batch_size = 1
    config.train.accumulation = 8
    config.train.steps = 400
