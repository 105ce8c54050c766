"""Small trees of every kind of leaf a checkpoint may meet."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bitmamba.io.checkpoint import Checkpointer

FINGERPRINTS = {
    "data": {"a.jsonl": "11", "b.jsonl": "22"},
    "tokenizer": "33",
    "template": None,
    "plan": "44",
    "model": {"d_model": 4, "layers": ("mamba2", "mlp")},
    "optim": {"name": "adamw"},
}
CONFIG = {"name": "toy", "model": {"d_model": 4}}


def make_trainable(step):
    """Weights that are a function of the step, so that a mix-up shows."""
    rng = np.random.default_rng(step)
    return {
        "embed": {"embedding": jnp.asarray(rng.standard_normal((5, 4)), jnp.bfloat16)},
        "layer_0": {"A_log": jnp.asarray(rng.standard_normal(3), jnp.float32)},
        "scale": jnp.float32(step),
    }


def make_opt_state(step):
    """Named tuples, tuples, None, empty states, a PRNG key, numpy, a Python number."""
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    trainable = make_trainable(step)
    state = tx.init(trainable)
    _, state = tx.update(trainable, state)
    return (state, optax.EmptyState(), None, jax.random.key(step), np.arange(3), step)


@pytest.fixture
def open_checkpointer(tmp_path):
    """Opens checkpointers in tmp_path/checkpoints, and closes them at the end."""
    opened = []

    def open_(**settings):
        defaults = {
            "directory": tmp_path / "checkpoints",
            "keep": 3,
            "fingerprints": FINGERPRINTS,
            "config": CONFIG,
        }
        checkpointer = Checkpointer(**defaults | settings)
        opened.append(checkpointer)
        return checkpointer

    yield open_
    for checkpointer in opened:
        with contextlib.suppress(OSError):  # a test may make the last save fail
            checkpointer.close()


def save(checkpointer, step, *, frozen_digests=None, trainable=None):
    """Save the toy trees of a step."""
    checkpointer.save(
        step,
        trainable=make_trainable(step) if trainable is None else trainable,
        opt_state=make_opt_state(step),
        frozen_digests=frozen_digests or {},
        extra={"bad_steps": step},
    )


def restore(checkpointer, **settings):
    """Restore into targets whose values are those of no step."""
    return checkpointer.restore_latest(
        make_trainable(999), make_opt_state(999), **settings
    )


def bits(leaf):
    """(dtype, shape, bytes) of a leaf."""
    dtype = str(getattr(leaf, "dtype", type(leaf)))
    if dtype.startswith("key<"):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return dtype, array.shape, array.tobytes()


def assert_same_bits(first, second):
    """Equal structure, and every leaf equal bit for bit."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert bits(a) == bits(b)


def as_loaded(tree):
    """As `load_params` gives it: numpy, and bfloat16 as float32."""

    def load(leaf):
        wide = np.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype
        return np.asarray(leaf).astype(wide)

    return jax.tree.map(load, tree)


def assert_is_step(restored, step):
    """What was restored is exactly what the step saved."""
    assert restored.step == step
    assert restored.meta["step"] == step
    assert_same_bits(restored.trainable, make_trainable(step))
    assert_same_bits(restored.opt_state, make_opt_state(step))


@pytest.fixture(scope="session")
def toy():
    """The functions and constants of this file, for the tests."""
    return SimpleNamespace(
        FINGERPRINTS=FINGERPRINTS,
        CONFIG=CONFIG,
        make_trainable=make_trainable,
        make_opt_state=make_opt_state,
        save=save,
        restore=restore,
        assert_same_bits=assert_same_bits,
        as_loaded=as_loaded,
        assert_is_step=assert_is_step,
    )
