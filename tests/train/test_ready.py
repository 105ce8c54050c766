"""Ternary codes once a step: the same numbers, and no quantiser in the loop."""

import importlib.util
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config import (
    Config,
    DataConfig,
    LoraConfig,
    LossConfig,
    MLPConfig,
    ModelConfig,
    TrainConfig,
)
from bitmamba.train import build
from bitmamba.train.objective import make_loss_fn, make_ready
from bitmamba.train.step import gradients
from bitmamba.types import Batch

pytestmark = pytest.mark.newest

V, L, M = 40, 9, 3


class Categories:
    categories = ("all",)


def make_config(mode="full", loss=LossConfig(), lora=LoraConfig(), **model):
    fields = {"dtype": "float32", "d_model": 16, "layers": ("mlp",)}
    return Config(
        name="t",
        workdir="unused",
        model=ModelConfig(vocab_size=V, mlp=MLPConfig(d_ff=24), **(fields | model)),
        data=DataConfig(replay=("a",), window=L),
        loss=loss,
        lora=lora,
        train=TrainConfig(mode=mode, batch_size=2, accumulation=M, steps=10),
    )


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    shape = M, 2, L
    ints = [rng.integers(0, V, shape, dtype=np.int32) for _ in range(2)]
    # Unlike token counts in the micro-batches.
    weights = (rng.random(shape) < [[[0.2]], [[0.9]], [[0.5]]]).astype(np.float32)
    positions = np.broadcast_to(np.arange(L, dtype=np.int32), shape)
    return Batch(*ints, weights, np.ones(shape, np.int32), positions, 0 * ints[0])


def fill(shapes, seed=0):
    rng = np.random.default_rng(seed)
    flat = {}
    for path, leaf in paths.flatten(shapes).items():
        noise = rng.standard_normal(leaf.shape)
        if path.endswith("kernel"):
            noise = noise / np.sqrt(leaf.shape[0])
        elif path.endswith(("scale", "D", "A_log")):
            noise = 1 + 0.2 * noise
        flat[path] = jnp.asarray(noise, leaf.dtype)
    return paths.unflatten(flat)


def compiled(config, parts, held, ready, options=None):
    """(trainable, held, batch) -> gradients, sums, divergence; compiled."""
    loss_fn = make_loss_fn(build.run_model(config), config.loss)

    def run(trainable, held, batch):
        return gradients(
            loss_fn,
            trainable,
            held,
            batch,
            n_categories=1,
            divergence_weight=config.loss.tmkl,
            key=jax.random.key(0),
            ready=ready,
        )

    lowered = jax.jit(run).lower(parts.trainable, held, make_batch())
    return lowered.compile(compiler_options=options)


def with_and_without(config, options=None):
    """The same gradients with the codes made beforehand, and in every micro-batch."""
    parts = build.build_parts(config, Categories)
    start, frozen = fill(parts.trainable, 1), fill(parts.frozen, 2)
    trainable = jax.tree.map(lambda x: x * 1.01, start)
    held = build.hold(config, start, frozen)
    ready = make_ready(build.run_model(config), config.loss)
    assert ready is not None
    return [
        compiled(config, parts, held, r, options)(trainable, held, make_batch())
        for r in (ready, None)
    ]


@pytest.mark.parametrize(("dtype", "remat"), [("float32", True), ("bfloat16", False)])
def test_gradients_and_losses_are_the_same_to_the_bit(dtype, remat, users_level):
    config = make_config(dtype=dtype, remat=remat)

    got, expected = with_and_without(config, users_level)

    assert all(np.any(leaf) for leaf in jax.tree.leaves(got[0]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
def test_directly_trained_kernels_beside_adapters_give_the_same(users_level):
    # Magnitudes look at the latent weight, as they do without codes.
    lora = LoraConfig(rank=2, place=("mlp",), dora=True, train=(".*up_proj/kernel",))
    config = make_config(mode="lora", lora=lora, loss=LossConfig(tmkl=0.5))

    got, expected = with_and_without(config, users_level)

    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
def test_the_base_of_a_full_step_is_the_same_up_to_the_heads_scale():
    # Frozen, the head's scale multiplies the activations and not the codes.
    config = make_config(loss=LossConfig(tmkl=0.5))

    got, expected = with_and_without(config)

    assert got[2] > 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * np.abs(b).max())


def test_gradients_equal_float64():
    config = make_config(norm_eps=1e-6)
    parts = build.build_parts(config, Categories)
    ready = make_ready(build.run_model(config), config.loss)
    held = build.hold(config, {}, {})
    trainable, batch = fill(parts.trainable, 5), make_batch()

    got, sums, _ = compiled(config, parts, held, ready)(trainable, held, batch)

    reference = _float64_reference()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), trainable)

        def objective(params):
            margins, total = [jnp.inf], 0.0
            for i in np.ndindex(M, 2):
                logits = reference.lm(params, batch.tokens[i], config.model, margins)
                log_p = jax.nn.log_softmax(logits)
                picked = jnp.take_along_axis(log_p, batch.targets[i][:, None], 1)[:, 0]
                total -= (picked * batch.loss_weights[i]).sum()
            return total / batch.loss_weights.sum(), jnp.stack(margins).min()

        run = jax.jit(jax.value_and_grad(objective, has_aux=True))
        (loss, margin), expected = jax.device_get(run(wide))
    assert margin > 3e-5, "too near a rounding tie to compare; take another seed"
    np.testing.assert_allclose(sums.loss.sum() / sums.weight.sum(), loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() < 1e-5 * np.abs(b).max()


def test_the_loop_over_micro_batches_quantises_no_weight():
    # With remat, since XLA:CPU takes the quantiser of other steps out of the loop.
    config = make_config(d_model=32, remat=True)
    parts = build.build_parts(config, Categories)
    held = build.hold(config, {}, {})
    sizes = {32 * 24, 32 * V}
    assert sizes == {
        math.prod(leaf.shape)
        for path, leaf in paths.flatten(parts.trainable).items()
        if path.endswith("kernel")
    }
    found = {}
    for ready in (None, make_ready(build.run_model(config), config.loss)):
        text = compiled(config, parts, held, ready).as_text()
        found[ready is not None] = [
            size for op, size in _in_loops(text) if size in sizes
        ]

    assert len(found[False]) >= 2, "the test sees no quantiser where there is one"
    assert found[True] == []


def test_a_step_of_one_micro_batch_makes_no_codes_beforehand():
    calls = []

    def loss_fn(trainable, frozen, batch, key, *ready):
        assert not ready
        return type("Loss", (), {})

    with pytest.raises(TypeError):  # the loss is none: it was reached without codes
        gradients(
            loss_fn,
            {"w": jnp.ones(2)},
            {},
            jax.tree.map(lambda x: x[:1], make_batch()),
            n_categories=1,
            divergence_weight=0.0,
            key=jax.random.key(0),
            ready=lambda *_: calls.append(1),
        )
    assert calls == []


def _in_loops(text):
    """(operation, elements) of every rounding and |x| inside a loop, however deep."""
    names = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", re.M)
    heads = list(names.finditer(text))
    ends = [*(h.start() for h in heads[1:]), len(text)]
    bodies = {h[1]: text[h.end() : e] for h, e in zip(heads, ends, strict=True)}
    todo = re.findall(r"body=%?([\w.\-]+)", text)
    seen, found = set(), []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        body = bodies[name]
        todo += re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", body)
        for shape, op in re.findall(
            r"= \w+\[([\d,]*)\]\S* (round-nearest-even|abs)\(", body
        ):
            found.append((op, math.prod(int(n) for n in shape.split(",") if n)))
    return found


def _float64_reference():
    """tests/models/float64.py."""
    path = Path(__file__).parents[1] / "models" / "float64.py"
    spec = importlib.util.spec_from_file_location("float64_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
