"""What a LoRA step must not pay for, read from the compiled program."""

import re

import jax
import pytest

from bitmamba import paths
from bitmamba.config import (
    Config,
    DataConfig,
    LoraConfig,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from bitmamba.train import build

D_MODEL, VOCAB, WINDOW = 24, 104, 32


class Categories:
    categories = ("all",)


def make(mode, linear, layer):
    return Config(
        name="t",
        workdir="unused",
        model=ModelConfig(
            vocab_size=VOCAB,
            d_model=D_MODEL,
            layers=(layer,),
            linear=linear,
            dtype="float32",
            mamba2=Mamba2Config(headdim=16, d_state=8, chunk_size=16),
            mlp=MLPConfig(d_ff=56),
        ),
        data=DataConfig(replay=("a",), window=WINDOW),
        optim=OptimConfig(name="adamw"),
        train=TrainConfig(mode=mode, batch_size=2, steps=10),
        lora=LoraConfig(rank=2) if mode == "lora" else LoraConfig(),
    )


@pytest.fixture(scope="module")
def compiled():
    """(parts, compiled step) by mode, kind of projections and of layer.

    With little effort, which changes machine code alone: text and plan are the user's.
    """
    made = {}

    def get(*key):
        if key not in made:
            config = make(*key)
            parts = build.build_parts(config, Categories)
            step, _ = build.compile_step(config, parts)
            made[key] = (parts, step)
        return made[key]

    return get


def makers_of(text, shape):
    """Names of the operations whose result has this shape."""
    sizes = ",".join(map(str, shape))
    return set(re.findall(rf"= \w+\[{sizes}\]\S* ([\w-]+)\(", text))


@pytest.mark.parametrize("linear", ["dense", "bit"])
def test_no_frozen_weight_is_copied_transposed_or_given_a_gradient(linear, compiled):
    """Its native layout serves the forward pass and the activation gradient."""
    parts, step = compiled("lora", linear, "mamba2")
    text = step.as_text()
    kernels = [p for p in paths.flatten(parts.frozen) if p.endswith("_proj/kernel")]
    shapes = [paths.flatten(parts.frozen)[path].shape for path in kernels]

    assert len(shapes) == 2
    for shape in [*shapes, (D_MODEL, VOCAB)]:
        assert makers_of(text, shape) == {"parameter"}, shape
        # The embedding happens to have the shape of a transposed head.
        assert makers_of(text, shape[::-1]) <= {"parameter"}, shape


def test_the_search_finds_a_weight_gradient_where_there_is_one(compiled):
    parts, step = compiled("full", "dense", "mlp")
    shape = paths.flatten(parts.trainable)["layer_0/mixer/up_proj/kernel"].shape

    assert "dot" in makers_of(step.as_text(), shape) | makers_of(
        step.as_text(), shape[::-1]
    )


@pytest.mark.newest
@pytest.mark.parametrize("linear", ["dense", "bit"])
def test_frozen_parameters_have_no_gradient_and_no_optimiser_state(linear, compiled):
    (full, full_step), (lora, lora_step) = (
        compiled(mode, linear, "mamba2") for mode in ("full", "lora")
    )
    sizes = {
        mode: sum(leaf.size for leaf in jax.tree.leaves(parts.trainable))
        for mode, parts in (("full", full), ("lora", lora))
    }
    state = build.state_shape(lora)

    kept = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert 2 * sizes["lora"] <= kept < 2 * sizes["lora"] + 10
    spared = 4 * 3 * (sizes["full"] - sizes["lora"])
    assert peak(full_step) - peak(lora_step) >= spared


def peak(step):
    memory = step.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes
