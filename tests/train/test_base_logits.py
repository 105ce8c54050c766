"""Base logits from disk instead of a copy of the base: same step, no second copy."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from bitmamba.config import (
    Config,
    DataConfig,
    LoraConfig,
    LossConfig,
    MLPConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from bitmamba.config_checks import check
from bitmamba.io.digests import tree_digests
from bitmamba.io.load import load_trainable
from bitmamba.paths import flatten
from bitmamba.train import base_logits, build, loop, restore
from bitmamba.train.arms import make_arms
from bitmamba.train.objective import make_loss_fn
from bitmamba.train.start import read_config, read_data
from bitmamba.train.state import init_state
from bitmamba.types import Batch
from configs import sft

pytestmark = pytest.mark.newest

V, L, M, B, STEPS = 13, 7, 2, 2, 3


class Data:
    """Random windows, the same whenever they are asked for."""

    categories, plan_digest = ("all",), "a"
    steps, batch_size, accumulation, window = STEPS, B, M, L

    def batches(self, start=0):
        for step in range(start, STEPS):
            rng = np.random.default_rng(step)
            ones = np.ones((M, B, L), np.int32)
            yield Batch(
                tokens=rng.integers(0, V, ones.shape, dtype=np.int32),
                targets=rng.integers(0, V, ones.shape, dtype=np.int32),
                loss_weights=rng.integers(0, 2, ones.shape).astype(np.float32),
                segment_ids=ones,
                positions=ones * np.arange(L, dtype=np.int32),
                source_ids=ones * 0,
            )


def make(workdir, mode="full", seed=0, **loss):
    config = Config(
        name="t",
        workdir=str(workdir),
        seed=seed,
        model=ModelConfig(
            vocab_size=V,
            d_model=8,
            layers=("mlp",),
            linear="dense",
            dtype="float32",
            mlp=MLPConfig(d_ff=12),
        ),
        data=DataConfig(replay=("a",), window=L),
        loss=LossConfig(**{"tmkl": 0.5, "base_logits": "cached", "top_k": 4} | loss),
        optim=OptimConfig(lr=0.1, warmup_steps=0),
        train=TrainConfig(mode=mode, batch_size=B, accumulation=M, steps=STEPS),
    )
    if mode == "lora":
        lora = LoraConfig(rank=2, place=("mlp",), train=(".*norm/scale",))
        config = dataclasses.replace(config, lora=lora)
    check(config)
    return config


def begin_run(config, data):
    """(parts, what a run holds before step 1), without a checkpoint."""
    parts = build.build_parts(config, data)
    own, frozen = build.split_trainable(config, restore.base_params(config, parts))
    digests = tree_digests(frozen)
    held = build.hold(config, own, frozen)
    trainable, held = restore.first_values(config, parts, own, held)
    state = init_state(trainable, parts.optimizer.init(trainable))
    return parts, restore.Started(state, held, digests, None, {})


def make_batches(config, data, parts, begin):
    console = Console(quiet=True)
    return base_logits.batches_with_base(config, data, parts, begin, console=console)


def served(config, data=None):
    data = data or Data()
    return list(make_batches(config, data, *begin_run(config, data))(0))


def equal(batches, others):
    pairs = list(zip(batches, others, strict=True))
    return all(
        np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)
    )


def trained(config):
    """Losses, divergences and parameters of the steps."""
    data = Data()
    parts, begin = begin_run(config, data)
    batches = data.batches
    if config.loss.is_cached:
        batches = make_batches(config, data, parts, begin)
    step, _ = build.compile_step(config, parts)
    state, numbers = begin.state, []
    for batch in batches(0):
        state, metrics = step(state, begin.held, batch)
        numbers.append((float(metrics["loss"]), float(metrics["divergence"])))
    return np.array(numbers), flatten(state.trainable)


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.once), "lora"])
def test_all_logits_from_disk_train_as_the_base_itself_does(mode, tmp_path):
    numbers, params = trained(make(tmp_path, mode, top_k=V))

    expected, expected_params = trained(make(tmp_path, mode, base_logits="copy"))

    assert expected[0, 1] < 1e-6
    assert expected[-1, 1] > 1e-3
    assert np.abs(numbers - expected).max() < 1e-5
    for path, leaf in expected_params.items():
        assert np.abs(params[path] - leaf).max() < 1e-4, path


def test_the_largest_ones_leave_an_unchanged_model_alone(tmp_path):
    config, data = make(tmp_path, top_k=4), Data()
    parts, begin = begin_run(config, data)
    batch = next(make_batches(config, data, parts, begin)(0))
    micro = jax.tree.map(lambda field: field[0], batch)
    loss_fn = jax.jit(make_loss_fn(parts.model, config.loss))
    same = begin.state.trainable
    other = jax.tree.map(lambda leaf: leaf + 0.1 * (leaf > 0), same)

    found = [loss_fn(tree, begin.held, micro).divergence for tree in (same, other)]

    assert found[0].max() < 1e-6
    assert found[1].max() > 1e-4


def test_each_window_gets_its_own_rows(tmp_path):
    config, data = make(tmp_path, top_k=4), Data()
    parts, begin = begin_run(config, data)

    batches = list(make_batches(config, data, parts, begin)(0))

    params = {"params": begin.state.trainable}
    assert len(batches) == STEPS
    for batch, plain in zip(batches, data.batches(), strict=True):
        assert equal([batch[: len(plain)]], [plain])
        assert batch.base_ids.shape == (M, B, L, 4)
        z = np.stack([parts.model.apply(params, tokens) for tokens in batch.tokens])
        order = np.argsort(-z, axis=-1)[..., :4]
        assert np.array_equal(batch.base_ids, order)
        largest = np.take_along_axis(z, order, -1)
        assert np.abs(batch.base_logits - largest).max() < 1e-5


def test_a_resumed_run_reads_what_it_would_have_read(tmp_path):
    config, data = make(tmp_path), Data()
    parts, begin = begin_run(config, data)
    unbroken = list(make_batches(config, data, parts, begin)(0))
    file = tmp_path / "base_logits/ids.npy"
    made = file.stat().st_mtime_ns
    moved = jax.tree.map(lambda leaf: leaf + 1, begin.state.trainable)
    resumed = begin._replace(state=begin.state._replace(step=1, trainable=moved))

    rest = list(make_batches(config, data, parts, resumed)(1))

    assert equal(rest, unbroken[1:])
    assert file.stat().st_mtime_ns == made

    file.with_name("made.json").unlink()
    again = list(make_batches(config, data, parts, resumed)(1))
    assert equal(again, unbroken[1:])
    assert file.stat().st_mtime_ns > made


@pytest.mark.parametrize("changed", ["base", "plan", "top_k", "unfinished"])
def test_what_was_made_of_something_else_is_made_anew(changed, tmp_path):
    before = served(make(tmp_path))
    data, changes = Data(), {"base": {"seed": 1}, "top_k": {"top_k": 3}}
    if changed == "plan":
        data.plan_digest = "b"
        # The identity alone must decide: what lies on disk is not read.
        np.load(tmp_path / "base_logits/ids.npy", mmap_mode="r+")[:] = 0
    if changed == "unfinished":
        (tmp_path / "base_logits/made.json").unlink()
        (tmp_path / "base_logits/logits.npy").write_bytes(b"")
    changes = changes.get(changed, {})

    after = served(make(tmp_path, **changes), data)

    assert equal(after, served(make(tmp_path / "clean", **changes)))
    assert equal(after, before) == (not changes)


def test_no_second_copy_of_the_parameters_is_held(tmp_path):
    sizes = {}
    for how in ("copy", "cached"):
        config = make(tmp_path, base_logits=how)
        parts = build.build_parts(config, Data())
        sizes[how] = build.memory_plan(config, parts).parameters
    assert flatten(parts.held.start) == {}

    own = flatten(parts.trainable).values()
    assert sizes["copy"] - sizes["cached"] == sum(4 * leaf.size for leaf in own)


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    class Full:
        free = 100

    monkeypatch.setattr(base_logits.shutil, "disk_usage", lambda path: Full)

    with pytest.raises(ValueError, match=r"cached logits take .* what is free there"):
        served(make(tmp_path))


def test_settings_that_cannot_be_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"base_logits: got 'stored'; expected one of"):
        make(tmp_path, base_logits="stored")
    with pytest.raises(ValueError, match=r"top_k: got 14; expected at most 13"):
        make(tmp_path, top_k=V + 1)
    with pytest.raises(ValueError, match=r"top_k: got 0; expected at least 1"):
        make(tmp_path, top_k=0)
    with pytest.raises(ValueError, match=r"base_logits: got cached in a sweep"):
        make_arms(make(tmp_path), lr=["0.1"])


@pytest.mark.once
def test_a_stopped_run_ends_bit_equal_to_an_unbroken_one(runs, tmp_path):
    def settings(name):
        config = runs.settings(sft.get_config(), layers="-")
        config.workdir = str(tmp_path / name)
        config.train.steps, config.train.accumulation = STEPS, 2
        config.eval.every, config.eval.max_windows = STEPS, 2
        config.eval.prompts = ()
        config.loss.update({"tmkl": 0.5, "base_logits": "cached", "top_k": 8})
        return read_config(config)

    config = settings("unbroken")
    assert loop.run(config, read_data(config))() == 0
    config = settings("stopped")
    data = read_data(config)
    batches, calls = data.batches, []

    def stopped_in_step_two(start):
        calls.append(start)
        for number, batch in enumerate(batches(start), start + 1):
            if len(calls) == 2 and number == 2:  # the first call computes logits
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    object.__setattr__(data, "batches", stopped_in_step_two)
    assert loop.run(config, data)() == 143

    assert loop.run(config, read_data(config))() == 0

    ends = [load_trainable(tmp_path / n)[1] for n in ("stopped", "unbroken")]
    assert ends[0]["step"] == ends[1]["step"] == STEPS
    assert ends[0]["digests"] == ends[1]["digests"]
    rows = Path(config.workdir, "metrics.jsonl").read_text("utf-8").splitlines()
    assert [r["step"] for r in map(json.loads, rows) if r.get("tmkl", 0) > 1e-5] == [
        2,
        3,
    ]
