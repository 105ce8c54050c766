"""The objective: target-masked KL to the base, from the same weights; the pull."""

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
from bitmamba.train.objective import Frozen, make_loss_fn
from bitmamba.types import Batch

pytestmark = pytest.mark.newest

V, L = 13, 7


class Categories:
    categories = ("all",)


def make(mode="lora", **loss):
    lora = LoraConfig(rank=2, place=("mlp", "lm_head"), train=(".*norm/scale",))
    return Config(
        name="t",
        workdir="unused",
        model=ModelConfig(
            vocab_size=V,
            d_model=8,
            layers=("mlp",),
            linear="dense",
            dtype="float32",
            mlp=MLPConfig(d_ff=12),
        ),
        data=DataConfig(replay=("a",), window=L),
        lora=lora if mode == "lora" else LoraConfig(),
        loss=LossConfig(**loss),
        train=TrainConfig(mode=mode, batch_size=2, steps=10),
    )


@pytest.fixture
def relative_error():
    def error(got, expected):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        return max(
            float(np.abs(np.float64(g) - np.asarray(e)).max() / np.abs(e).max())
            for g, e in pairs
        )

    return error


def fill(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(0.5 * rng.standard_normal(s.shape), s.dtype), shapes
    )


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (2, L), dtype=np.int32)
    ones = np.ones_like(tokens)
    return Batch(
        tokens=tokens,
        targets=rng.integers(0, V, (2, L), dtype=np.int32),
        loss_weights=rng.integers(0, 2, (2, L)).astype(np.float32),
        segment_ids=ones,
        positions=np.broadcast_to(np.arange(L, dtype=np.int32), tokens.shape),
        source_ids=ones * 0,
    )


def logits64(tree, tokens):
    """The model above in float64, written out, with its adapters merged."""
    p = paths.flatten(tree)

    def norm(x, scale):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def weight(site):
        w = p[f"{site}/kernel"]
        return w + 16.0 * p[f"{site}/a"] @ p[f"{site}/b"] if f"{site}/a" in p else w

    x = p["embed/embedding"][tokens]
    h = norm(x, p["layer_0/norm/scale"])
    gate, up = (h @ weight(f"layer_0/mixer/{n}_proj") for n in ("gate", "up"))
    x = x + gate / (1 + jnp.exp(-gate)) * up @ weight("layer_0/mixer/down_proj")
    return norm(x, p["final_norm/scale"]) @ weight("lm_head")


def objective64(trainable, start, frozen, batch, weight):
    """Mean loss over weighted tokens, plus weight times the mean KL without targets."""
    now = logits64(paths.merge(trainable, frozen), batch.tokens)
    base = logits64(paths.merge(start, frozen), batch.tokens)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(now), batch.targets[..., None], -1)[
        ..., 0
    ]
    others = jnp.arange(V) != batch.targets[..., None]
    p, q = (jnp.where(others, jnp.exp(z), 0.0) for z in (base, now))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    ratio = jnp.where(others, p, 1.0) / jnp.where(others, q, 1.0)
    divergence = (p * jnp.log(ratio)).sum(-1)
    share = batch.loss_weights / batch.loss_weights.sum()
    return (share * (nll + weight * divergence)).sum(), (nll, divergence)


def run(config, trainable, held, batch):
    """Our gradient, loss and divergence."""
    loss_fn = make_loss_fn(build.run_model(config), config.loss)

    def objective(trainable):
        nll, divergence = loss_fn(trainable, held, batch)
        share = batch.loss_weights / batch.loss_weights.sum()
        value = (share * (nll + config.loss.tmkl * divergence)).sum()
        return value, (nll, divergence)

    return jax.jit(jax.grad(objective, has_aux=True))(trainable)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_loss_divergence_and_gradient_equal_float64(mode, relative_error):
    # Given parameters that have left their start, adapters among them.
    config = make(mode, tmkl=0.7)
    parts = build.build_parts(config, Categories)
    first, frozen = fill(parts.trainable, 1), fill(parts.frozen, 2)
    trainable = jax.tree.map(lambda x: x + 0.1, first)
    held = Frozen(
        build.hold(config, {}, frozen).weights, build.hold(config, first, {}).start
    )
    batch = make_batch()

    got = run(config, trainable, held, batch)

    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64), (trainable, held.start, frozen)
        )
        gradient = jax.jit(jax.grad(objective64, has_aux=True), static_argnums=4)
        expected = gradient(*wide, batch, 0.7)
    assert relative_error(got, expected) < 1e-5


def test_only_what_trains_directly_has_a_second_copy():
    """The base's logits come from the weights that are there."""
    starts = {}
    for mode in ("lora", "full"):
        for name in ("tmkl", "pull"):
            config = make(mode, **{name: 0.5})
            parts = build.build_parts(config, Categories)
            starts[mode, name] = set(paths.flatten(parts.held.start))
            trained = set(paths.flatten(parts.trainable))
            if (mode, name) != ("lora", "tmkl"):
                assert starts[mode, name] == trained
    parts = build.build_parts(make("lora"), Categories)

    assert starts["lora", "tmkl"] == {"layer_0/norm/scale", "final_norm/scale"}
    assert parts.held.start == {}


def test_before_the_first_step_nothing_diverges():
    config = make("lora", tmkl=0.7)
    parts = build.build_parts(config, Categories)
    tree = fill(parts.trainable, 1)
    flat = {
        path: 0 * leaf if path.endswith("/b") else leaf
        for path, leaf in paths.flatten(tree).items()
    }
    trainable = paths.unflatten(flat)
    held = build.hold(config, trainable, fill(parts.frozen, 2))

    gradient, (_, divergence) = run(config, trainable, held, make_batch())

    # The adapter of the head changes how its products are summed, hence not 0.
    assert np.all(np.abs(divergence) < 1e-12)
    assert np.any(paths.flatten(gradient)["lm_head/b"])


def test_a_pull_alone_measures_the_divergence_without_its_gradient():
    config, both = make("lora", pull=0.5), make("lora", pull=0.5, tmkl=1e-9)
    parts = build.build_parts(config, Categories)
    first, frozen = fill(parts.trainable, 1), fill(parts.frozen, 2)
    trainable = jax.tree.map(lambda x: x + 0.1, first)
    held = build.hold(config, first, frozen)

    gradient, (nll, divergence) = run(config, trainable, held, make_batch())
    _, (_, expected) = run(both, trainable, held, make_batch())

    np.testing.assert_allclose(divergence, expected, rtol=1e-6)
    assert np.all(divergence > 0)
    assert all(np.any(g) for g in jax.tree.leaves(gradient))
    assert np.all(nll > 0)
