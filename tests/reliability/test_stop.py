"""Told to stop while it evaluates, a run leaves at once and evaluates on resume."""

import json
import os
import signal
from pathlib import Path

import pytest

from bitmamba.io.checkpoint import load_params
from bitmamba.train import loop, records
from bitmamba.train.start import read_config, read_data
from configs import sft

STEPS = 6
SMALL = {
    "model.layers": "-",
    "model.d_model": 16,
    "model.vocab_size": 300,
    "model.mlp.d_ff": 16,
    "data.tokenizer": "bytes",
    "data.window": 32,
    "data.replay": (),
    "data.replay_share": 0.0,
    "data.heldout_replay": (),
    "data.min_score": None,
    "train.steps": STEPS,
    "train.batch_size": 2,
    "eval.every": 3,
    "eval.max_windows": 4,
    "eval.prompts": ("Hi",),
    "eval.sample_tokens": 2,
    "checkpoint.every": 2,
    "checkpoint.init_from": None,
}


@pytest.fixture
def train(examples, tmp_path):
    """train(name) -> exit code of a run in tmp_path/name."""

    def run(name):
        config = sft.get_config("tiny")
        config.workdir = str(tmp_path / name)
        config.data.sft = (str(examples / "examples.jsonl"),)
        for path, value in SMALL.items():
            *groups, leaf = path.split(".")
            part = config
            for group in groups:
                part = part[group]
            part[leaf] = value
        config = read_config(config)
        return loop.run(config, read_data(config))()

    return run


def rows(workdir, key):
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r[key]) for r in map(json.loads, lines) if key in r]


@pytest.mark.once
def test_a_stop_in_an_evaluation_or_in_the_last_one(train, tmp_path, monkeypatch):
    held_out_losses, windows = records.held_out_losses, []

    def told_to_stop(eval_step, *args, **kwargs):
        def counted(*arguments):
            windows.append(1)
            return eval_step(*arguments)

        os.kill(os.getpid(), signal.SIGTERM)
        return held_out_losses(counted, *args, **kwargs)

    assert train("whole") == 0
    calls = []

    def at_the_second(*args, **kwargs):  # that of step 3, or of step 6
        calls.append(1)
        return (told_to_stop if len(calls) == 2 else held_out_losses)(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(records, "held_out_losses", at_the_second)
        assert train("run") == 143
        assert load_params(tmp_path / "run")[1]["step"] == 3
        calls.clear()
        assert train("run") == 143
        assert load_params(tmp_path / "run")[1]["step"] == STEPS

    assert train("run") == 0

    assert len(windows) == 2  # each time left before the first window was evaluated
    ours, theirs = (load_params(tmp_path / n)[1] for n in ("run", "whole"))
    assert ours["digests"] == theirs["digests"]
    for key in ("loss", "eval/loss"):
        assert rows(tmp_path / "run", key) == rows(tmp_path / "whole", key)
    samples = [(tmp_path / n / "samples.jsonl").read_text() for n in ("run", "whole")]
    assert samples[0] == samples[1]
