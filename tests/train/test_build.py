"""Composition: what trains, what it costs, and the same loss on several devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config import Config, DataConfig, MLPConfig, ModelConfig, TrainConfig
from bitmamba.train import build, restore

pytestmark = pytest.mark.newest

ROOT = Path(__file__).resolve().parents[2]


class Categories:
    """All that building needs of the data."""

    categories = ("a", "replay")


def make_config(mode="full", **model):
    fields = {"linear": "dense", "dtype": "float32", "mlp": MLPConfig(d_ff=64)}
    return Config(
        name="t",
        workdir="unused",
        model=ModelConfig(
            **(
                {"vocab_size": 24, "d_model": 32, "layers": ("mlp",) * 3}
                | fields
                | model
            )
        ),
        data=DataConfig(replay=("a",), window=64),
        train=TrainConfig(mode=mode, batch_size=2, steps=10),
    )


def flops(function, *shapes):
    return function.lower(*shapes).compile().cost_analysis()["flops"]


def test_head_only_trains_the_head_and_pays_for_no_backward_through_the_body():
    cost, trained = {}, {}
    for mode in ("full", "head_only"):
        config = make_config(mode)
        parts = build.build_parts(config, Categories)
        state = build.state_shape(parts)
        cost[mode] = flops(parts.step, state, parts.held, build.batch_shape(config))
        trained[mode] = set(paths.flatten(parts.trainable))
    micro = build.batch_shape(config, micro=True)
    forward = flops(parts.eval_step, parts.trainable, parts.held, micro)

    tokens = 2 * 64
    head_product = 2 * tokens * 32 * 24
    body_product = 3 * 3 * 2 * tokens * 32 * 64
    assert trained["head_only"] == {"lm_head/kernel"}
    assert trained["head_only"] < trained["full"]
    # Two products for the head's gradients and one for its logits again; the rest is
    # the loss and the optimiser. One product of the body would already be too much.
    extra = cost["head_only"] - forward
    assert extra < 4 * head_product + body_product / 3
    assert cost["full"] - forward > 2 * body_product


def test_the_large_vocabulary_is_never_formed_whole_in_a_step():
    vocab_size = 2**17
    config = make_config(vocab_size=vocab_size)
    config_shape = build.batch_shape(config)
    parts = build.build_parts(config, Categories)

    text = parts.step.lower(build.state_shape(parts), parts.held, config_shape)
    # 2**17 columns of 256 tokens are the limit of one block; these are 512 tokens.
    big = build.batch_shape(config)._replace(
        **{
            name: jax.ShapeDtypeStruct((1, 8, 64), leaf.dtype)
            for name, leaf in config_shape._asdict().items()
        }
    )
    big_text = parts.step.lower(build.state_shape(parts), parts.held, big)

    assert f"{2 * 64}x{vocab_size}xf32" in text.as_text()
    assert f"{8 * 64}x{vocab_size}xf32" not in big_text.as_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("lm_head/kernel"), "lacks lm_head/kernel"),
        (lambda p: p.update({"x": np.zeros(1)}), "unknown parameter x"),
        (
            lambda p: p.update({"final_norm/scale": np.zeros(3, np.float32)}),
            r"final_norm/scale: got float32\(3,\); expected float32\(32,\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(change, message, monkeypatch):
    config = make_config()
    parts = build.build_parts(config, Categories)
    flat = {
        path: np.zeros(leaf.shape, leaf.dtype)
        for path, leaf in paths.flatten(parts.base_shapes).items()
    }
    change(flat)
    monkeypatch.setattr(restore, "load_params", lambda _: (paths.unflatten(flat), {}))
    config = Config(
        **{
            **{f: getattr(config, f) for f in ("name", "workdir", "model", "data")},
            "checkpoint": type(config.checkpoint)(init_from="elsewhere"),
        }
    )

    with pytest.raises(ValueError, match=message):
        restore.base_params(config, parts)


DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests_step import loss_fn, make_batch, start
from bitmamba.train.step import make_train_step
assert jax.device_count() == 4
weights = np.zeros((1, 8, 16))
weights[0, 0, :1] = weights[0, 5, :9] = weights[0, 7] = 1
batch = make_batch(1, 8, weights=weights)
losses = []
for spec in (P(), P(None, "data")):
    state, frozen, update = start()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    put = jax.device_put(batch, NamedSharding(mesh, spec))
    state, frozen = jax.device_put((state, frozen), NamedSharding(mesh, P()))
    step = jax.jit(make_train_step(loss_fn, update, n_categories=3))
    for _ in range(3):
        state, metrics = step(state, frozen, put)
    losses.append((float(metrics["loss"]), np.asarray(state.trainable["table"])))
(a, p), (b, q) = losses
assert abs(a - b) < 1e-6 * abs(a), (a, b)
np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-6)
print("equal")
"""


def test_rows_spread_over_devices_weigh_the_same_as_on_one(tmp_path):
    # Unlike token counts: a mean of the devices' means would differ.
    source = (Path(__file__).parent / "test_step.py").read_text()
    (tmp_path / "tests_step.py").write_text(source)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }

    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
