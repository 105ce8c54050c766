"""Whole training steps of a part of a model, as gpu_check.py times them.

Needs jax, flax, optax and orbax, no data: layers of student_1b4's width, random tokens.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bitmamba import config, paths
from bitmamba.lora.adapters import init_adapters
from bitmamba.models import build_model, init_params
from bitmamba.train import build
from bitmamba.train.state import init_state
from bitmamba.types import Batch

STEPS = 10


class Sizes(NamedTuple):
    """Of the model and its batch."""

    vocab_size: int = 32000
    d_model: int = 2048
    layers: int = 4
    headdim: int = 64
    d_state: int = 128
    length: int = 2048


# One layer that the interpreter can run: a check of the check.
SMALL = Sizes(64, 64, 1, 16, 16, 70)


class Categories:
    """All that building a step needs of the data."""

    categories = ("all",)


def make_config(sizes: Sizes, *, linear: str, mode: str, kernels: str) -> config.Config:
    """bfloat16, one row; full training by Adafactor or adapters by AdamW."""
    lora = config.LoraConfig(place=("all",), rank=16)
    made = config.Config(
        name="gpu_check",
        workdir="unused",
        kernels=kernels,
        model=config.ModelConfig(
            vocab_size=sizes.vocab_size,
            d_model=sizes.d_model,
            layers=("mamba2",) * sizes.layers,
            linear=linear,
            dtype="bfloat16",
            mamba2=config.Mamba2Config(headdim=sizes.headdim, d_state=sizes.d_state),
        ),
        data=config.DataConfig(replay=("unused",), window=sizes.length),
        optim=config.OptimConfig(name="adafactor" if mode == "full" else "adamw"),
        train=config.TrainConfig(mode=mode, batch_size=1, steps=100),
    )
    return made if mode == "full" else dataclasses.replace(made, lora=lora)


def run_steps(sizes: Sizes, *, steps: int = STEPS, **choice: str) -> dict:
    """Losses, median milliseconds of a step and tokens a second.

    Args:
        choice: linear "dense" or "bit", mode "full" or "lora", kernels "reference" or
            "pallas".
    """
    made = make_config(sizes, **choice)
    parts = build.build_parts(made, Categories)
    params = init_params(build_model(made.model), jax.random.key(0))
    own, frozen = build.split_trainable(made, params)
    adapters = init_adapters(
        parts.model.adapters, {}, weight=None, key=jax.random.key(1)
    )
    trainable = paths.merge(own, adapters)
    held = jax.device_put(build.hold(made, trainable, frozen))
    state = init_state(trainable, jax.jit(parts.optimizer.init)(trainable))
    compiled, seconds = build.compile_step(made, parts)
    batch = jax.tree.map(jnp.asarray, _batch(sizes))
    losses, taken = [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = compiled(state, held, batch)
        losses.append(float(metrics["loss"]))
        taken.append(time.perf_counter() - start)
    middle = sorted(taken[1:])[len(taken[1:]) // 2]
    return {
        **choice,
        "losses": losses,
        "ms": 1e3 * middle,
        "tokens_per_s": sizes.length / middle,
        "compile_s": seconds,
        "peak_gib": build_peak(compiled) / 2**30,
    }


def build_peak(compiled) -> int:
    """Bytes of the step by XLA's plan."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def _batch(sizes: Sizes) -> Batch:
    """One row of three documents."""
    rng = np.random.default_rng(0)
    shape = (1, 1, sizes.length)
    tokens = rng.integers(0, sizes.vocab_size, (2, *shape), dtype=np.int32)
    ids = np.broadcast_to(1 + np.arange(sizes.length) * 3 // sizes.length, shape)
    return Batch(
        tokens=tokens[0],
        targets=tokens[1],
        loss_weights=np.ones(shape, np.float32),
        segment_ids=ids.astype(np.int32),
        positions=np.broadcast_to(np.arange(sizes.length, dtype=np.int32), shape),
        source_ids=np.zeros(shape, np.int32),
    )
