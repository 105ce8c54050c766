"""LoRA runs as training leaves them, made without training; and `sweep_cases`."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config import Config
from bitmamba.config_read import from_config_dict, to_json
from bitmamba.io import digests
from bitmamba.io.checkpoint import Checkpointer
from bitmamba.lora.adapters import adapter_shapes
from bitmamba.models import build_model, param_shapes
from bitmamba.train import merging
from bitmamba.train.build import run_model, split_trainable
from configs import lora, sft

sys.path.append(str(Path(__file__).parent))

PLACES = ("in_proj.x", "in_proj.dt", "out_proj", "mlp", "embed")


class Made(NamedTuple):
    """`folder`/base, a whole checkpoint, and `path`, a run on it."""

    folder: Path
    base: Any
    path: str
    config: Config


def settings(config, **model):
    """A small model, and little of the bundled data."""
    small = {"layers": "M-", "d_model": 32, "vocab_size": 4096} | model
    config.model.update(small)
    config.model.mamba2.update({"headdim": 16, "d_state": 8})
    config.model.mlp.d_ff = 48
    config.data.sft = ("assets:data/sft_scored.jsonl",)
    config.data.replay, config.data.replay_share = (), 0.0
    config.data.window = 64
    config.train.batch_size = 2
    config.checkpoint.init_from = None
    return config


def random_tree(shapes, size, seed):
    rng = np.random.default_rng(seed)
    flat = {}
    for path, leaf in paths.flatten(shapes).items():
        noise = size * rng.standard_normal(leaf.shape)
        if path.endswith("kernel"):
            noise = noise / np.sqrt(leaf.shape[0])
        flat[path] = np.float32(1 + noise if path.endswith(("scale", "D")) else noise)
    return paths.unflatten(flat)


def make_runs(folder, *, size=0.5, model=None, offset=False, train=()):
    """A base of random weights and a LoRA run on it, as training leaves them."""
    model = model or {}
    config = from_config_dict(settings(sft.get_config(), **model))
    base = random_tree(param_shapes(build_model(config.model)), 1.0, seed=0)
    merging.write_model(base, config, folder / "base", step=0, extra={})
    typed = settings(lora.get_config(), **model)
    typed.lora.place = PLACES
    typed.lora.train, typed.lora.state_offset = train, offset
    typed.checkpoint.init_from = str(folder / "base")
    config = from_config_dict(typed)
    offsets = {"layer_0/mixer/state_offset": (4, 16, 8)} if offset else {}
    shapes = adapter_shapes(run_model(config).adapters, offsets)
    trained, frozen = split_trainable(config, base)
    trained = jax.tree.map(lambda leaf: leaf + np.float32(0.25), trained)
    trained = paths.merge(trained, random_tree(shapes, size, seed=1))
    checkpointer = Checkpointer(
        folder / "lora" / "checkpoints", keep=1, fingerprints={}, config=to_json(config)
    )
    checkpointer.save(
        3,
        trainable=trained,
        opt_state={},
        frozen_digests=digests.tree_digests(frozen),
        frozen_source=str(folder / "base"),
        extra={},
    )
    checkpointer.close()
    return Made(folder=folder, base=base, path=str(folder / "lora"), config=config)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Base and run of a ternary model."""
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def adapter_run(made):
    """That run, loaded."""
    return merging.load_adapter_run(made.path)


@pytest.fixture(scope="session")
def runs():
    """The functions of this file, for the tests."""
    return SimpleNamespace(make=make_runs, settings=settings)
