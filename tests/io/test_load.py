import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.io import inspection
from bitmamba.io.checkpoint import load_params

ROOT = Path(__file__).parents[2]
FROZEN = {"embed": {"other": jnp.arange(3.0)}, "body": {"w": jnp.ones((2, 2))}}


@pytest.fixture
def saved(toy, open_checkpointer, tmp_path):
    """Steps 1 and 2 of a head-only run, under tmp_path/checkpoints."""
    checkpointer = open_checkpointer()
    table = checkpointer.save_frozen(FROZEN)
    for step in (1, 2):
        toy.save(checkpointer, step, frozen_digests=table)
    assert checkpointer.wait() is None
    return tmp_path


@pytest.mark.parametrize(
    ("path", "step"),
    [(".", 2), ("checkpoints", 2), ("checkpoints/1", 1), ("checkpoints/2", 2)],
)
def test_whole_tree_from_any_path(toy, saved, path, step):
    params, record = load_params(saved / path)

    assert record["step"] == step
    expected = toy.make_trainable(step)
    expected["embed"] |= FROZEN["embed"]
    expected["body"] = FROZEN["body"]
    toy.assert_same_bits(params, toy.as_loaded(expected))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))


def test_a_run_folder_named_like_a_step(toy, saved):
    shutil.move(saved / "checkpoints", saved / "7" / "checkpoints")

    assert load_params(saved / "7")[1]["step"] == 2


def test_step_without_its_frozen_parameters(saved):
    shutil.copytree(saved / "checkpoints" / "2", saved / "alone" / "2")

    with pytest.raises(ValueError, match=r"frozen-\w+ is missing.*whole checkpoints"):
        load_params(saved / "alone" / "2")


@pytest.mark.parametrize(
    ("path", "found"), [("nowhere", "no "), ("empty", "no "), ("file", "is a file")]
)
def test_nothing_there(tmp_path, path, found):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")

    with pytest.raises(ValueError, match=f"{path}: {found}.*expected a work"):
        load_params(tmp_path / path)


FOUR_DEVICES = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from bitmamba.io.checkpoint import Checkpointer
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("data",))
def put(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
trainable = {"w": put(jnp.arange(32.0).reshape(8, 4), "data"), "b": put(jnp.ones(3))}
checkpointer = Checkpointer(sys.argv[1], keep=2, fingerprints={}, config={})
checkpointer.save(4, trainable=trainable, opt_state=(), frozen_digests={}, extra={})
checkpointer.close()
"""


def test_checkpoint_of_four_devices_on_one(toy, open_checkpointer, tmp_path):
    """B056: looked at, loaded and resumed on a smaller machine."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
    }
    command = [sys.executable, "-c", FOUR_DEVICES, str(tmp_path / "checkpoints")]
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert jax.device_count() == 1
    expected = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(3)}

    leaves = inspection.contents(tmp_path).items["trainable"]
    params, _ = load_params(tmp_path)
    target = jax.tree.map(jnp.zeros_like, expected)
    restored = open_checkpointer(fingerprints={}).restore_latest(target, ())

    assert {p: leaf.spec for p, leaf in leaves.items()} == {
        "w": "float32[8,4]",
        "b": "float32[3]",
    }
    toy.assert_same_bits(params, jax.tree.map(np.asarray, expected))
    toy.assert_same_bits(restored.trainable, expected)
