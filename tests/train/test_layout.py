"""Over many devices: what is cut, what is refused, and the same numbers as on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from bitmamba.config import (
    Config,
    DataConfig,
    DistributedConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from bitmamba.config_mesh import check_distributed, check_mesh
from bitmamba.train.layout import AXES, Layout, make_layout

ROOT = Path(__file__).resolve().parents[2]


def make_config(**mesh):
    return Config(
        name="t",
        workdir="unused",
        model=ModelConfig(vocab_size=24, d_model=32, layers=("mlp",)),
        data=DataConfig(replay=("a",)),
        train=TrainConfig(batch_size=2),
        mesh=MeshConfig(**mesh),
    )


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 6), P("fsdp")),
        ((6, 8), P(None, "fsdp")),
        ((8, 8), P("fsdp")),  # the first of the largest
        ((16, 6, 12), P("fsdp")),
        ((6, 10), P()),  # nothing divides
        ((4, 4), P()),  # small
        ((64,), P()),
        ((64, 1), P()),  # a factor of Adafactor
        ((), P()),
    ],
)
def test_a_leaf_is_cut_along_its_largest_axis_that_divides(shape, spec):
    layout = Layout(AbstractMesh((2, 4), AXES), 32)

    assert layout.spec(jax.ShapeDtypeStruct(shape, jnp.float32)) == spec


def test_one_device_has_no_layout():
    assert make_layout(make_config()) is None
    assert make_layout(make_config(data=0)) is None


def test_too_large_a_mesh_is_refused_by_its_sizes():
    with pytest.raises(ValueError, match="data 2 x fsdp 4 = 8 devices, but there are"):
        make_layout(make_config(data=2, fsdp=4))


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        (check_mesh, MeshConfig(data=-1), "config.mesh.data: got -1"),
        (check_mesh, MeshConfig(fsdp=0), "config.mesh.fsdp: got 0"),
        (check_distributed, DistributedConfig(coordinator="host"), "got 'host'"),
        (check_distributed, DistributedConfig(bind="1.2.3.4:x"), "bind: got"),
        (check_distributed, DistributedConfig(processes=0), "processes: got 0"),
        (
            check_distributed,
            DistributedConfig(processes=2, process_id=2),
            "expected 0 to 1",
        ),
        (check_distributed, DistributedConfig(lost_s=1), "at least 5 seconds"),
    ],
)
def test_settings_that_cannot_work_are_refused(check, wrong, message):
    with pytest.raises(ValueError, match=message):
        check(wrong)


def test_bytes_are_of_one_device():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)
    tree = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}

    assert Layout(mesh, 1).n_bytes(tree) == 256


DEVICES = """
import dataclasses, jax, numpy as np, jax.numpy as jnp, pytest
from test_layout_again import make_config
from bitmamba.config import *
from bitmamba.train import build, restore
from bitmamba.train.layout import on_host, make_layout
from bitmamba.types import Batch
assert jax.device_count() == 8
class Data: categories = ("a", "b", "replay")
def batches(n, micro):
    rng = np.random.default_rng(0)
    for _ in range(n):
        shape = micro, 8, 16
        ints = [rng.integers(0, 24, shape, np.int32) for _ in range(2)]
        # Unlike token counts: a mean of the devices' means would differ.
        share = rng.random((micro, 8, 1)) ** 2
        weights = (rng.random(shape) < share).astype(np.float32)
        segments = np.cumsum(rng.random(shape) < 0.2, -1).astype(np.int32) + 1
        sources = rng.integers(0, 3, shape, np.int32)
        positions = np.broadcast_to(np.arange(16, dtype=np.int32), shape)
        yield Batch(*ints, weights, segments, positions, sources)
def train(config):
    parts = build.build_parts(config, Data)
    params = restore.base_params(config, parts)
    own, frozen = build.split_trainable(config, params)
    own, held = restore.first_values(
        config, parts, own, build.hold(config, own, frozen))
    state = build.first_state(parts, own)
    layout = parts.layout
    held = layout.place(held) if layout else held
    losses = []
    for batch in batches(3, config.train.accumulation):
        put = layout.put(batch) if layout else batch
        state, metrics = parts.step(state, held, put)
        losses.append([float(metrics["loss"]), float(metrics["report"]["grad_norm"])])
        losses[-1].append(float(metrics.get("divergence", 0)))
    micro = jax.tree.map(lambda x: x[0], batch)
    put = layout.put_whole(micro) if layout else micro
    sums = parts.eval_step(state.trainable, held, put)
    return np.array(losses), jax.device_get(sums), on_host(state.trainable), state
widths = dict(vocab_size=24, d_model=16, dtype="float32", mlp=MLPConfig(d_ff=16),
    mamba2=Mamba2Config(headdim=16, d_state=4, chunk_size=8))
full = dict(train=TrainConfig(batch_size=8, accumulation=2),
    model=ModelConfig(layers=("mlp",), linear="dense", **widths),
    optim=OptimConfig(name="adamw"))
ternary = dict(train=TrainConfig(batch_size=8, accumulation=2),
    model=ModelConfig(layers=("mlp",), linear="bit", remat=True, **widths))
lora = dict(train=TrainConfig(batch_size=8, mode="lora"),
    model=ModelConfig(layers=("mamba2",), linear="bit", **widths),
    lora=LoraConfig(rank=4), loss=LossConfig(tmkl=0.5))
small = dataclasses.replace(make_config(), **CASE)
mesh = MeshConfig(data=2, fsdp=4, min_size=1)
on_one = train(small)
on_eight = train(dataclasses.replace(small, mesh=mesh))
assert len(set(on_one[0][:, 0])) == 3
np.testing.assert_allclose(on_eight[0], on_one[0], rtol=2e-5, atol=1e-6)
np.testing.assert_allclose(on_eight[1].loss, on_one[1].loss, rtol=2e-5)
np.testing.assert_array_equal(on_eight[1].weight, on_one[1].weight)
for a, b in zip(*map(jax.tree.leaves, (on_eight[2], on_one[2])), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
cut = [x for x in jax.tree.leaves(on_eight[3].trainable)
       if x.addressable_shards[0].data.size < x.size]
assert cut, "nothing lies in parts"
with pytest.raises(ValueError, match="got 6 for 8 devices .* multiple of 8"):
    make_layout(dataclasses.replace(small, mesh=mesh, train=TrainConfig(batch_size=6)))
print("equal")
"""


@pytest.mark.once
@pytest.mark.parametrize("case", ["full", "ternary", "lora"])
def test_eight_devices_give_the_numbers_of_one(tmp_path, case):
    """Dense and AdamW with micro-batches; ternary codes that all of these share;
    adapters of ternary weights with TMKL."""
    (tmp_path / "test_layout_again.py").write_text(Path(__file__).read_text())
    flags = "--xla_force_host_platform_device_count=8"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }

    done = subprocess.run(
        [sys.executable, "-c", DEVICES.replace("CASE", case)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
