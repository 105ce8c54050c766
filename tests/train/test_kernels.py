"""A model trained with kernels="pallas", interpreted, and with the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.config import (
    BitMamba2Config,
    Config,
    DataConfig,
    Mamba2Config,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from bitmamba.models import init_params
from bitmamba.train import build
from bitmamba.types import Batch
from pallas_kernels import backend, compat

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(
        not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
    ),
]
V, L, STEPS = 40, 70, 3
OPS = {"ssd", "causal_conv1d", "bit_product"}


class Categories:
    categories = ("all",)


def train(kernels, layer, linear):
    """The loss and the norm of the gradient at each step, (2, STEPS)."""
    model = ModelConfig(
        vocab_size=V,
        d_model=64,
        layers=(layer,),
        linear=linear,
        mamba2=Mamba2Config(headdim=64, d_state=15),
        bitmamba2=BitMamba2Config(n_heads=1),
    )
    config = Config(
        name="t",
        workdir="unused",
        kernels=kernels,
        model=model,
        data=DataConfig(replay=("a",), window=L),
        optim=OptimConfig(lr=1e-2, warmup_steps=0),
        train=TrainConfig(batch_size=1, accumulation=1, steps=STEPS),
    )
    parts = build.build_parts(config, Categories)
    params = init_params(parts.model, jax.random.key(0))
    state = build.first_state(parts, params)
    held = build.hold(config, params, {})
    measured = []
    for step in range(STEPS):
        state, metrics = parts.step(state, held, batch(step))
        measured.append((metrics["loss"], metrics["report"]["grad_norm"]))
    return np.array(measured, np.float64).T


def batch(seed):
    """Three documents, the cuts nowhere near a chunk's."""
    ids, targets = np.random.default_rng(seed).integers(0, V, (2, 1, 1, L), np.int32)
    segments = np.searchsorted([9, 50], np.arange(L), side="right")[None, None]
    segments = segments.astype(np.int32) + 1
    weights, zeros = np.ones(ids.shape, np.float32), np.zeros_like(ids)
    return Batch(*map(jnp.asarray, (ids, targets, weights, segments, zeros, zeros)))


@pytest.mark.parametrize(
    ("layer", "linear", "form"),
    [
        pytest.param("bitmamba2", "dense", "mma", marks=pytest.mark.once),
        ("mamba2", "bit", "mma"),
        ("mamba2", "bit", "wgmma"),
    ],
)
def test_losses_are_those_of_the_reference(layer, linear, form, caplog):
    expected = train("reference", layer, linear)
    backend.log_choice.cache_clear()

    with backend.products_by(form), caplog.at_level("INFO", logger="pallas_kernels"):
        got = train("pallas", layer, linear)

    ran = {
        op for op in OPS if f"{op}: implementation=pallas runs pallas" in caplog.text
    }
    assert ran == (OPS if linear == "bit" else OPS - {"bit_product"})
    assert got[0, 0] != got[0, -1]  # something was learnt
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-3)
    # Activations in bfloat16: one code of a ternary layer more or less moves it so far.
    np.testing.assert_allclose(got[1], expected[1], rtol=2e-2)
