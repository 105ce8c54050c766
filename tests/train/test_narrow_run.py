"""Runs with bfloat16 weights and gradients: kept so, stopped and resumed to the bit."""

import contextlib
import copy
import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.io.load import load_params, read_meta
from bitmamba.paths import flatten
from bitmamba.train import build, bundle, loop, restore
from bitmamba.train.start import read_config, read_data
from configs import sft

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("programs_compiled_once")]
STEPS = 6
NARROW = {"optim.master_dtype": "bfloat16", "optim.gradient_dtype": "bfloat16"}


def settings(workdir, **changes):
    """The bundled data, a ternary model of one tiny layer; saves every second step."""
    config = sft.get_config("tiny")
    config.workdir = str(workdir)
    small = {
        "model.layers": "-",
        "model.d_model": 16,
        "model.mlp.d_ff": 16,
        "data.window": 32,
        "train.batch_size": 2,
        "train.accumulation": 2,
        "train.steps": STEPS,
        "eval.max_windows": 2,
        "eval.every": STEPS,
        "eval.prompts": (),
        "checkpoint.every": 2,
        "checkpoint.init_from": None,
    }
    config.update_from_flattened_dict(small | changes)
    return read_config(config)


@functools.cache
def data_of(data_config):
    """All runs here have the same."""
    assert data_config == settings("unused").data
    return read_data(settings("unused"))


def run(config, *, stop=None):
    """Train; during step `stop` the process is told to stop."""
    data = copy.copy(data_of(config.data))
    batches = type(data).batches.__get__(data)

    def until_stop(start):
        for number, batch in enumerate(batches(start), start + 1):
            if number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    object.__setattr__(data, "batches", until_stop)
    return loop.run(config, data)()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """An unbroken run with both settings."""
    workdir = tmp_path_factory.mktemp("narrow") / "unbroken"
    with workdir.with_suffix(".out").open("w") as o, contextlib.redirect_stdout(o):
        assert run(settings(workdir, **NARROW)) == 0
    return workdir


def saved(workdir):
    return read_meta(workdir / "checkpoints" / str(STEPS))


def test_kernels_are_saved_in_bfloat16_and_loaded_in_float32(narrow):
    dtypes = {
        path: digest.partition("[")[0]
        for path, digest in saved(narrow)["digests"]["trainable"].items()
    }

    params, _ = load_params(narrow)

    narrow_ones = {path for path, dtype in dtypes.items() if dtype == "bfloat16"}
    assert narrow_ones == {
        "lm_head/kernel",
        *(f"layer_0/mixer/{name}_proj/kernel" for name in ("gate", "up", "down")),
    }
    assert set(dtypes.values()) == {"bfloat16", "float32"}
    assert {x.dtype for x in flatten(params).values()} == {np.dtype("float32")}


def test_every_kernel_has_moved(narrow):
    config = settings(narrow, **NARROW)
    parts = build.build_parts(config, data_of(config.data))
    before = build.as_masters(config, restore.base_params(config, parts))
    after = flatten(load_params(narrow)[0])

    for path, leaf in flatten(before).items():
        if leaf.dtype == jnp.bfloat16:
            share = np.mean(np.asarray(leaf, np.float32) != after[path])
            assert share > 0.2, path


def test_a_stop_and_the_rest_change_no_bit(narrow, tmp_path):
    config = settings(tmp_path / "stopped", **NARROW)
    assert run(config, stop=4) == 143
    assert load_params(tmp_path / "stopped")[1]["step"] < STEPS

    assert run(config) == 0

    assert saved(tmp_path / "stopped")["digests"] == saved(narrow)["digests"]


def test_another_run_starts_from_it(narrow, tmp_path):
    config = settings(tmp_path / "next", **{"checkpoint.init_from": str(narrow)})
    parts = build.build_parts(config, data_of(config.data))

    params = restore.base_params(config, parts)

    assert {x.dtype for x in flatten(params).values()} == {np.dtype("float32")}


def test_a_bundle_of_it_reads_back(narrow, tmp_path):
    # The batch of a step and the state before it, in their dtypes.
    config = settings(tmp_path / "run", **NARROW)
    data = data_of(config.data)
    parts = build.build_parts(config, data)
    first = restore.base_params(config, parts)
    held = build.hold(config, {}, {})
    trainable, held = restore.first_values(config, parts, first, held)
    state = build.first_state(parts, trainable)
    prepared = type("Run", (), {"config": config, "data": data, "parts": parts})
    prepared.batches, prepared.peers = data.batches, type("P", (), {"count": 1})

    folder = bundle.write(prepared, state, held, step=1, cause="t", lr_scale=1.0)
    back = bundle.read(folder)

    for a, b in zip(*map(jax.tree.leaves, (back.state, state)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_defaults_leave_the_fingerprint_of_older_runs(tmp_path):
    def optim(**changes):
        config = settings(tmp_path, **changes)
        return restore.fingerprints(config, data_of(config.data))["optim"]

    assert not optim().keys() & {"gradient_dtype", "master_dtype"}
    assert optim(**NARROW)["master_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "accumulation"), [("gradient_dtype", 2), ("master_dtype", 1)]
)
def test_one_step_is_that_of_float32_up_to_bfloat16(name, accumulation, tmp_path):
    ends = []
    for changes in ({}, {f"optim.{name}": "bfloat16"}):
        changes |= {"train.accumulation": accumulation, "optim.warmup_steps": 0}
        config = settings(tmp_path, **changes)
        data = data_of(config.data)
        parts = build.build_parts(config, data)
        first = restore.base_params(config, parts)
        # What bfloat16 holds, so that both have the same codes.
        first = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), first)
        first = jax.tree.map(lambda x: np.asarray(x, np.float32), first)
        held = build.hold(config, {}, {})
        own = jax.tree.map(jnp.array, first)  # the step may write into it
        trainable, held = restore.first_values(config, parts, own, held)
        state = build.first_state(parts, trainable)
        state, metrics = parts.step(state, held, next(iter(data.batches(0))))
        ends.append((state.trainable, metrics["loss"], metrics["report"]["grad_norm"]))

    (a, loss, norm), (b, narrow_loss, narrow_norm) = ends
    assert loss == narrow_loss
    np.testing.assert_allclose(norm, narrow_norm, rtol=2e-3)
    for path, leaf in flatten(b).items():
        got, wide, start = (np.float64(flatten(t)[path]) for t in (b, a, first))
        allowed = 2.0**-6 * np.abs(wide - start).max()
        if leaf.dtype == jnp.bfloat16:  # and one rounding of the weight, either way
            allowed = allowed + 2.0**-7 * np.abs(wide)
        assert (np.abs(got - wide) <= allowed).all(), path
