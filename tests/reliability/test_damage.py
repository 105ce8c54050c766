"""Every file of a run's checkpoints damaged in every way: exact bits, or one line."""

import logging
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from bitmamba.io import digests, steps
from bitmamba.io.checkpoint import load_params
from bitmamba.train import build, restore
from bitmamba.train.start import read_config, read_data
from configs import sft

pytestmark = pytest.mark.newest

# Head only, so that there are frozen parameters too, which all steps share.
SMALL = {
    "model.layers": "M",
    "model.d_model": 16,
    "model.vocab_size": 300,
    "model.mamba2.headdim": 16,
    "model.mamba2.d_state": 4,
    "data.tokenizer": "bytes",
    "data.window": 32,
    "data.replay": (),
    "data.replay_share": 0.0,
    "data.heldout_replay": (),
    "data.min_score": None,
    "train.mode": "head_only",
    "train.steps": 2,
    "train.batch_size": 2,
    "checkpoint.init_from": None,
}


def flip(at):
    """One bit, at a share of the file."""

    def damage(file):
        data = bytearray(file.read_bytes())
        if data:
            data[int(at * (len(data) - 1))] ^= 0x10
        file.write_bytes(data)

    return damage


RANDOM = random.Random(0)
SHARES = [0.0, 1.0, *(RANDOM.random() for _ in range(8))]
# tests/io/test_damage.py has the others, and a flip in the middle, on a toy.
QUICK = ("half",)
DAMAGES = {
    "delete": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(
        file.read_bytes()[: file.stat().st_size // 2]
    ),
    **{f"flip at {share:.2f}": flip(share) for share in SHARES},
}


@pytest.fixture(scope="module")
def whole(examples, tmp_path_factory):
    """(config, data, parts, the saved states by step); checkpoints 1 and 2 on disk."""
    config = sft.get_config("tiny")
    config.workdir = str(tmp_path_factory.mktemp("damage") / "run")
    config.data.sft = (str(examples / "examples.jsonl"),)
    config.update_from_flattened_dict(SMALL)
    config = read_config(config)
    data = read_data(config)
    parts = build.build_parts(config, data)
    checkpointer = restore.make_checkpointer(config, data)
    begin = restore.start_or_resume(config, parts, checkpointer)
    saved = {}
    for step in (1, 2):
        trainable = jax.tree.map(lambda x, s=step: x + s, begin.state.trainable)
        checkpointer.save(
            step,
            trainable=trainable,
            opt_state=begin.state.opt_state,
            frozen_digests=begin.digests,
            extra=restore.remembered(begin.state),
        )
        checkpointer.wait()
        saved[step] = digests.tree_digests((trainable, begin.state.opt_state))
    checkpointer.close()
    return config, data, parts, saved, digests.tree_digests(begin.held.weights)


def files_of(config):
    folder = Path(config.workdir) / "checkpoints"
    wanted = [*folder.glob("2/**/*"), *folder.glob("frozen-*/**/*")]
    return sorted(f.relative_to(folder) for f in wanted if f.is_file())


@pytest.fixture
def copied(whole, tmp_path, monkeypatch):
    """Put a fresh copy of the checkpoints where the run expects them."""
    folder = Path(whole[0].workdir) / "checkpoints"
    backup = tmp_path / "backup"
    shutil.copytree(folder, backup)

    def fresh():
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        return folder

    yield fresh
    fresh()


def resume(whole, caplog):
    """(step, its warnings) after checking every bit of what is resumed."""
    config, data, parts, saved, frozen = whole
    caplog.clear()
    checkpointer = restore.make_checkpointer(config, data)
    begin = restore.start_or_resume(config, parts, checkpointer)
    checkpointer.close()
    step = int(begin.state.step)
    found = digests.tree_digests((begin.state.trainable, begin.state.opt_state))
    assert found == saved[step]
    assert digests.tree_digests(begin.held.weights) == frozen
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert all("\n" not in line for line in told)
    return step, told


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in DAMAGES
    ],
)
def test_one_damaged_file_ends_on_exact_bits_and_a_line(
    whole, copied, caplog, monkeypatch, damage
):
    # OWN-2, promise 2. Of a frozen file: the base is made again, and is the same.
    outcomes = []
    for name in files_of(whole[0]):
        folder = copied()
        DAMAGES[damage](folder / name)

        step, told = resume(whole, caplog)

        if name.parts[0] == "2":
            moved = [f.name for f in steps.damaged_folders(folder)]
            assert moved == ([] if step == 2 else ["2.damaged"]), name
            assert len(told) == (step == 1), name
        else:
            assert step == 2
            assert len(told) in (0, 2), name  # what was damaged, and what was done
        outcomes.append((name.parts[0], step, len(told)))
    assert {step for kind, step, _ in outcomes if kind == "2"} <= {1, 2}
    assert ("2", 1, 1) in outcomes


def test_a_whole_item_that_is_gone(whole, copied, caplog):
    for item in ("trainable", "opt_state", "meta"):
        shutil.rmtree(copied() / "2" / item)

        assert resume(whole, caplog)[0] == 1


def test_a_damaged_base_whose_origin_changed_is_refused_by_name(
    whole, copied, caplog, monkeypatch
):
    config, data, parts, *_ = whole
    (folder,) = copied().glob("frozen-*")
    shutil.rmtree(folder)
    other = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), parts.base_shapes)
    monkeypatch.setattr(restore, "base_params", lambda *_: other)
    checkpointer = restore.make_checkpointer(config, data)

    with pytest.raises(ValueError, match=r"frozen-\w+ is missing.*not where they") as e:
        restore.start_or_resume(config, parts, checkpointer)

    checkpointer.close()
    assert "\n" not in str(e.value)


def test_a_frozen_file_damaged_is_never_loaded_silently(whole, copied):
    refused = []
    for name in files_of(whole[0]):
        if name.parts[0] == "2":
            continue
        folder = copied()
        before = load_params(folder)[0]
        flip(0.5)(folder / name)
        try:
            after = load_params(folder)[0]
        except ValueError as error:
            refused.append(str(error))
            continue
        assert digests.tree_digests(after) == digests.tree_digests(before)
    assert refused
    assert not any("\n" in line for line in refused)
