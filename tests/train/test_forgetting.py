"""Comparing ways to keep knowledge: what each trains, resuming, results."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bitmamba.data.plan import SFT
from bitmamba.train import forgetting
from bitmamba.train.start import read_config, read_data
from bitmamba.train.ways import make_ways
from configs import sft

ROOT = Path(__file__).parents[2]
NAMES = ["plain", "replay", "tmkl_0.5", "replay_tmkl_0.5", "pull_0.01"]


@pytest.fixture
def typed(runs):
    config = runs.settings(sft.get_config(), layers="-")
    config.data.replay, config.data.replay_share = ("assets:data/replay.jsonl",), 0.25
    config.train.steps = 30
    return config


@pytest.fixture(scope="module")
def read():
    """Reads each data set once for all tests."""
    known = {}

    def read(config):
        key = config.data, config.train, config.eval
        if key not in known:
            known[key] = read_data(config)
        return known[key]

    return read


@pytest.fixture
def make(tmp_path, read):
    def make(typed, tmkl=("0.5",), pull=("0.01",)):
        return make_ways(
            read_config(typed), tmkl=tmkl, pull=pull, out=tmp_path, read_data=read
        )

    return make


def test_ways_differ_in_what_they_are_named_for_alone(typed, make, tmp_path):
    plain = read_config(typed)

    ways = make(typed)

    assert [way.name for way in ways] == NAMES
    for way, (share, tmkl, pull) in zip(
        ways,
        [(0, 0, 0), (0.25, 0, 0), (0, 0.5, 0), (0.25, 0.5, 0), (0, 0, 0.01)],
        strict=True,
    ):
        assert way.config.workdir == str(tmp_path / way.name)
        assert way.config.loss.tmkl == tmkl
        assert way.config.loss.pull == pull
        assert way.config.data.replay_share == share
        same = dataclasses.replace(
            way.config,
            name=plain.name,
            workdir=plain.workdir,
            loss=plain.loss,
            data=plain.data,
            train=plain.train,
        )
        assert same == plain


def test_those_with_replay_see_the_same_examples_in_more_steps(typed, make):
    plain, replay, *_ = make(typed)

    assert plain.config.train.steps == 30
    assert 38 <= replay.config.train.steps <= 41  # a quarter of the tokens is replay
    plans = [way.data.plan for way in (plain, replay)]
    windows = [
        [plan.window(i)[1] for i in np.flatnonzero(plan.streams == SFT)]
        for plan in plans
    ]
    assert len(windows[0]) == 60
    assert abs(len(windows[1]) - 60) <= 1
    for mine, theirs in zip(*windows, strict=False):
        assert np.array_equal(mine, theirs)


def test_a_list_gives_a_run_for_each_strength(typed, make):
    ways = make(typed, tmkl=("0.5", "2"), pull=("0.1",))

    assert [way.name for way in ways][2:] == [
        "tmkl_0.5",
        "tmkl_2",
        "replay_tmkl_0.5",
        "replay_tmkl_2",
        "pull_0.1",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tmkl": ("0",)}, "--tmkl: got '0'; expected numbers above 0"),
        ({"tmkl": ("a",)}, "--tmkl: got 'a'; expected numbers above 0"),
        ({"pull": ()}, "--pull: got an empty list"),
        ({"pull": ("0.1", "0.10")}, "--pull: got 0.10 twice"),
        ({"pull": ("2",)}, "config.loss.pull: got 2; expected 0 <= pull <= 1"),
    ],
)
def test_strengths_that_cannot_be_are_told(flags, message, typed, make):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(typed, **flags)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("data", "replay_share", 0.0, "got a config without examples or without repl"),
        ("data", "heldout_replay", (), "got no held-out examples or no held-out text"),
    ],
)
def test_what_cannot_be_compared_is_told(part, name, value, message, typed, make):
    typed[part][name] = value

    with pytest.raises(ValueError, match=re.escape(message)):
        make(typed)


def test_what_the_config_keeps_knowledge_with_is_in_no_way_but_its_own(typed, make):
    typed.loss.tmkl = 0.7

    found = {way.name: way.config.loss.tmkl for way in make(typed)}

    assert found["plain"] == found["replay"] == 0.0
    assert 0.7 not in found.values()


@pytest.fixture
def fake(monkeypatch):
    """Runs that only write what a run writes; exit codes by name, 0 if not given."""
    done, codes = [], {}

    def run(config, data):
        def train():
            done.append(config.name)
            folder = Path(config.workdir)
            folder.mkdir(parents=True, exist_ok=True)
            loss = 4.0 + 0.1 * len(done)
            rows = [
                {"step": 0, "eval/loss": 5.0, "retention/loss": 4.0},
                {"step": 1, "loss": 5.0, "tokens_per_s": 100.0},
                {"step": 30, "eval/loss": loss, "retention/loss": 4.5},
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
            return codes.get(config.name, 0)

        return train

    monkeypatch.setattr(forgetting.loop, "run", run)
    return done, codes


def test_finished_ways_are_not_run_again(typed, make, fake, tmp_path):
    done, codes = fake
    codes["tmkl_0.5"] = 143
    ways = make(typed)

    assert forgetting.run(ways, tmp_path, title="t") == 143
    assert done == NAMES[:3]
    assert not (tmp_path / "forgetting.json").exists()

    codes.clear()
    assert forgetting.run(ways, tmp_path, title="t") == 0
    assert done == [*NAMES[:3], *NAMES[2:]]
    found = json.loads((tmp_path / "forgetting.json").read_text("utf-8"))
    assert [way["way"] for way in found] == NAMES
    assert found[0]["evaluations"][1]["eval/loss"] == pytest.approx(4.1)
    assert (tmp_path / "forgetting.png").exists()

    typed.optim.lr = 1e-4
    assert forgetting.run(make(typed), tmp_path, title="t") == 0
    assert done[6:] == NAMES


def test_a_way_that_diverged_is_told_and_the_others_go_on(
    typed, make, fake, tmp_path, capsys
):
    _, codes = fake
    codes["plain"] = 3

    assert forgetting.run(make(typed), tmp_path, title="t") == 0

    found = json.loads((tmp_path / "forgetting.json").read_text("utf-8"))
    assert [way["diverged"] for way in found] == [True] + 4 * [False]
    assert "plain diverged: its numbers were not finite." in capsys.readouterr().out
    codes.update(dict.fromkeys(NAMES, 3))
    for name in NAMES[1:]:
        (tmp_path / name / "finished.json").unlink()
    assert forgetting.run(make(typed), tmp_path, title="t") == 3


@pytest.mark.once
def test_results_are_those_of_the_run(typed, make, tmp_path):
    typed.train.steps, typed.eval.max_windows, typed.eval.prompts = 1, 2, ()
    plain = make(typed)[0]

    assert forgetting.run([plain], tmp_path, title="t") == 0

    (found,) = json.loads((tmp_path / "forgetting.json").read_text("utf-8"))
    first, last = found["evaluations"]
    assert (first["step"], last["step"]) == (0, 1)
    assert last["eval/loss"] != first["eval/loss"]
    assert last["retention/base_loss"] == first["retention/loss"]
    documents = [batch.segment_ids for batch in plain.data.batches()]
    assert found["tokens"] == found["example_tokens"] == np.count_nonzero(documents)
    assert found["training_seconds"] > 0


def test_a_mistake_is_one_sentence_and_help_tells_the_ways():
    def run(*args):
        return subprocess.run(
            [sys.executable, "scripts/compare_forgetting.py", *args],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )

    mistake = run("--config=configs/warmup.py")

    assert mistake.returncode == 2
    assert mistake.stderr.startswith("error: forgetting: got a config without examples")
    assert len(mistake.stderr.splitlines()) == 1
    assert "pull_P        examples alone and loss.pull=P" in run("--help").stdout
