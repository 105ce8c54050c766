"""Every config and preset loads, resolves, and traces one step, without allocating."""

from pathlib import Path

import jax
import pytest

from bitmamba import command_line, config_read
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.train import build
from configs import presets

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path.stem
    for path in (ROOT / "configs").glob("*.py")
    if "def get_config" in path.read_text(encoding="utf-8")
)


def load(name: str, preset: str) -> Config:
    path = ROOT / "configs" / f"{name}.py"
    return config_read.from_config_dict(command_line.load_config(f"{path}:{preset}"))


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("name", FILES)
def test_a_config_resolves_for_every_preset(name, preset):
    config = load(name, preset)

    assert config.name == name
    expected = f"runs/{name}" if preset == "tiny" else f"runs/{name}_{preset}"
    assert config.workdir == expected


@pytest.mark.parametrize("name", FILES)
def test_one_step_of_the_default_traces(name):
    config = load(name, "tiny")
    parts = build.build_parts(config, FakeData())

    state, metrics = jax.eval_shape(
        parts.step, build.state_shape(parts), parts.held, build.batch_shape(config)
    )

    assert jax.tree.structure(state.trainable) == jax.tree.structure(parts.trainable)
    assert metrics["loss"].shape == ()
    assert metrics["sums"].loss.shape == (2,)


def test_the_large_recipe_is_that_of_the_student():
    config = load("sft", "student_1b4")

    assert config.optim.name == "adafactor"
    assert config.optim.adafactor.eps1 is None
    assert (config.optim.clamp, config.optim.norm) == (1.0, "inf")
    assert config.optim.rules[0].lr_mult == 50.0
    assert config.optim.rules[0].pattern == ".*/(A_log|D|dt_bias)"


class FakeData(DataBundle):
    """Only the names of the categories."""

    def __init__(self):
        object.__setattr__(self, "categories", ("sft", "replay"))
