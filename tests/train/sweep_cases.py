"""A sweep of a model of one layer, on made-up data."""

import json
from types import MappingProxyType, SimpleNamespace

import numpy as np

from bitmamba.config import (
    Config,
    DataConfig,
    EvalConfig,
    LoraConfig,
    MLPConfig,
    ModelConfig,
    OptimConfig,
    Rule,
    TrainConfig,
)
from bitmamba.train import sweep
from bitmamba.train.arms import make_arms
from bitmamba.train.divergence import Limits
from bitmamba.types import Batch

STEPS = 4


def make_config(name="adamw", mode="lora", **optim):
    return Config(
        name="t",
        workdir="unused",
        model=ModelConfig(
            vocab_size=24,
            d_model=16,
            layers=("mlp",),
            linear="dense",
            dtype="float32",
            mlp=MLPConfig(d_ff=32),
        ),
        data=DataConfig(replay=("a",), window=16),
        lora=LoraConfig(rank=2, alpha=4.0) if mode == "lora" else LoraConfig(),
        optim=OptimConfig(
            name=name,
            lr=1e-2,
            warmup_steps=2,
            rules=(
                Rule(pattern=".*/[ab]", lr_mult=3.0, optional=True),
                Rule(pattern=".*"),
            ),
            **optim,
        ),
        train=TrainConfig(mode=mode, batch_size=2, steps=STEPS),
        eval=EvalConfig(every=2),
    )


def make_batch(seed, *, micro=False):
    rng = np.random.default_rng(seed)
    shape = (2, 16) if micro else (1, 2, 16)
    return Batch(
        tokens=rng.integers(0, 24, shape).astype(np.int32),
        targets=rng.integers(0, 24, shape).astype(np.int32),
        loss_weights=np.ones(shape, np.float32),
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), shape).copy(),
        source_ids=np.zeros(shape, np.int32),
    )


class Data:
    """All that a sweep needs of the data; counts how often a batch is read."""

    categories = ("a", "replay")
    fingerprints = MappingProxyType({"data": "of this test"})
    plan_digest = "0"
    account = SimpleNamespace(epochs=1.0)
    eval_replay = (make_batch(99, micro=True),)

    def __init__(self, eval_sft=(make_batch(98, micro=True),)):
        self.eval_sft, self.read = eval_sft, 0

    def batches(self, start_step):
        for seed in range(start_step, STEPS):
            self.read += 1
            yield make_batch(seed)


def run_sweep(tmp_path, config, data, limits=None, how="auto", **lists):
    code = sweep.run(
        make_arms(config, **lists),
        data,
        how=how,
        limits=limits or Limits(),
        out=tmp_path,
        command=lambda arm: f"train lr={arm.lr!r}",
    )()
    return code, json.loads((tmp_path / "sweep.json").read_text())
