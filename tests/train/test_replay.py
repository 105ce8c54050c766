"""Seeded faults: the replay of a bundle names operation, layer, token and cause."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.models import init_params
from bitmamba.optim import adafactor
from bitmamba.train import build, bundle, causes, replay
from bitmamba.train.start import read_config, read_data
from bitmamba.train.state import init_state
from configs import sft

pytestmark = pytest.mark.newest


def settings(**changes):
    config = sft.get_config("tiny")
    config.workdir = "unused"
    small = {
        "model.layers": "-M",
        "model.d_model": 16,
        "model.mlp.d_ff": 16,
        "model.mamba2.headdim": 16,
        "model.mamba2.d_state": 4,
        "model.dtype": "float32",
        "data.window": 16,
        "data.max_refused_share": 1.0,  # many answers begin after the window
        "train.batch_size": 2,
        "train.steps": 8,
        "checkpoint.init_from": None,
        "optim.rules": ({"pattern": ".*"},),
    }
    config.update_from_flattened_dict(small | changes)
    return read_config(config)


def make(config, data, *, edit=lambda flat: flat):
    """A bundle before step 1, with parameters (by path) as `edit` leaves them."""
    parts = build.build_parts(config, data)
    flat = paths.flatten(init_params(parts.model, jax.random.key(0)))
    trainable = paths.unflatten(edit(dict(flat)))
    state = init_state(trainable, parts.optimizer.init(trainable))
    batch = jax.tree.map(jnp.asarray, next(iter(data.batches(0))))
    info = {"step": 1, "categories": data.categories}
    held = build.hold(config, trainable, {})
    return bundle.Bundle(info, config, parts, state, held, batch)


@pytest.fixture(scope="module")
def config():
    return settings()


@pytest.fixture(scope="module")
def data(config):
    return read_data(config)


def set_to(path, at, value):
    def edit(flat):
        return flat | {path: flat[path].at[at].set(value)}

    return edit


@pytest.mark.once
def test_a_healthy_step_has_nothing_to_find(config, data):
    assert replay.replay(make(config, data)) is None


def test_a_nan_row_of_a_parameter_is_named(config, data):
    path = "layer_0/mixer/up_proj/kernel"

    found = replay.replay(make(config, data, edit=set_to(path, 3, jnp.nan)))

    assert found.parameter == f"trainable/{path}"
    assert found.layer == "layer_0/mixer/up_proj"
    assert f"parameter {path} was not finite before the step: 16 of" in found.cause
    assert "in row 3;" in found.cause
    assert found.token == (0, 0, 0)
    assert "loss" in found.bad


def test_an_exploding_dt_bias_is_named(config, data):
    path = "layer_1/mixer/dt_bias"

    found = replay.replay(make(config, data, edit=set_to(path, 1, 1e30)))

    assert "layer_1/mixer/dt_bias is 1e+30 at head 1" in found.cause
    assert found.cause.startswith("exploding dt_bias")
    assert found.layer.startswith("layer_1/mixer")
    assert found.origin.bad == ("float32",)
    assert found.lanes["float64"] == 0


@pytest.mark.parametrize(
    ("bias", "kind", "told"),
    [(95.0, "value", "dt overflow: exp("), (86.8, "gradient", "dt overflow: softplus")],
    ids=["inf", "gradient lost"],
)
def test_a_naive_softplus_is_named(config, data, monkeypatch, bias, kind, told):
    # B061: from 89 on its value is inf, and at 88 its gradient is lost already.
    monkeypatch.setattr(jax.nn, "softplus", lambda x: jnp.log1p(jnp.exp(x)))
    edit = set_to("layer_1/mixer/dt_bias", 1, bias)

    found = replay.replay(make(config, data, edit=edit))

    assert found.cause.startswith(told)
    assert (found.layer, found.kind) == ("layer_1/mixer", kind)
    assert "recurrence.py" in found.origin.source


def test_an_absurd_learning_rate_is_named(data):
    optim = {"optim.name": "adamw", "optim.lr": 1e30, "optim.warmup_steps": 0}

    cause = causes.absurd_rate(make(settings(**optim), data))

    assert cause.startswith("optim.lr is 1e+30 (usually 1e-6 to 1)")


def torchs_own_rule(g, stats, p, *, new_weight, cap, cfg, scaled):
    """PyTorch's clamp(V, eps1²).rsqrt() as it stands, without our floor."""
    del cap, scaled
    stats = adafactor._new_stats(g, stats, new_weight=new_weight, added=0.0)
    variance = jnp.square(adafactor._root_variance(stats, eps1=1e-30))
    eps1 = jnp.float32(np.float32(cfg.eps1) ** 2)
    return g * jax.lax.rsqrt(jnp.maximum(variance, eps1)), stats


def test_eps_1e30_under_pytorchs_rule_is_named(data, monkeypatch):
    # A row of the embedding whose token is not in the batch has no gradient.
    monkeypatch.setattr(adafactor, "_update_leaf", torchs_own_rule)
    config = settings(**{"optim.adafactor.eps1": 1e-30})

    found = replay.replay(make(config, data))

    assert found.layer == "optimizer"
    assert found.cause.startswith("optimiser floor: adafactor divides by the root of")
    assert "eps1 1e-30; its square is 0 in float32" in found.cause
    assert "embed/embedding" in found.cause
    assert found.bad[0] == "update of embed/embedding"
