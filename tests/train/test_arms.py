"""The lists of a sweep, and the mistakes in them."""

import pytest

from bitmamba.config import Config, DataConfig, ModelConfig, TrainConfig
from bitmamba.train.arms import make_arms


@pytest.mark.parametrize(
    ("mode", "lists", "message"),
    [
        ("lora", {}, "nothing to vary"),
        ("lora", {"lr": []}, "--lr: got an empty list; expected numbers, as --lr="),
        ("lora", {"lr": ["1e-3", "x"]}, "--lr: got 'x'; expected a number"),
        ("lora", {"lr": ["1e-3", "0.001"]}, "--lr: got 0.001 twice"),
        ("lora", {"lr": ["-1"]}, "config.optim.lr: got -1"),
        ("lora", {"lr": ["nan"]}, "config.optim.lr: got nan"),
        ("lora", {"wd": ["-0.1"]}, "config.optim.weight_decay: got -0.1"),
        ("lora", {"rank": ["2.5"]}, "--rank: got '2.5'; expected a whole number"),
        ("lora", {"rank": ["0"]}, "config.lora.rank: got 0"),
        ("full", {"rank": ["8"]}, "--rank: got 8 with train.mode=full"),
    ],
)
def test_mistakes_in_the_lists_are_told(mode, lists, message):
    config = Config(
        name="t",
        workdir="unused",
        model=ModelConfig(vocab_size=8, d_model=8, layers=("mlp",)),
        data=DataConfig(replay=("a",)),
        train=TrainConfig(mode=mode),
    )

    with pytest.raises(ValueError, match=message):
        make_arms(config, **lists)
