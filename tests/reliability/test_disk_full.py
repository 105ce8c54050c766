"""A disk that fills up while a run trains: told at once, nothing good lost, retried."""

import contextlib
import json
import subprocess
import time
from pathlib import Path

import pytest

from bitmamba.io import steps
from bitmamba.io.checkpoint import load_params
from bitmamba.train import loop
from bitmamba.train.start import read_config, read_data
from configs import sft

pytestmark = pytest.mark.newest

STEPS = 8
SMALL = {
    "model.layers": "-",
    "model.d_model": 64,
    "model.vocab_size": 2048,
    "model.mlp.d_ff": 16,
    "data.tokenizer": "bytes",
    "data.window": 32,
    "data.replay": (),
    "data.replay_share": 0.0,
    "data.heldout_replay": (),
    "data.min_score": None,
    "train.steps": STEPS,
    "train.batch_size": 2,
    "eval.every": STEPS,
    "eval.max_windows": 1,
    "eval.prompts": (),
    "checkpoint.every": 2,
    "checkpoint.init_from": None,
}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB; a checkpoint takes about 1."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system can be mounted by root alone")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(workdir, after):
    """Take all of the disk once a step is saved."""
    until = time.monotonic() + 30
    while not (workdir / "checkpoints" / str(after)).exists():
        assert time.monotonic() < until, "the step before was not saved in time"
        time.sleep(0.01)
    with (
        (workdir / "ballast").open("wb", buffering=0) as file,
        contextlib.suppress(OSError),
    ):
        while file.write(b"x" * 4096):
            pass


def train(workdir, examples, *, at):
    """Run; `at` are {step: function} called before the step's batch is read."""
    config = sft.get_config("tiny")
    config.workdir = str(workdir)
    config.data.sft = (str(examples / "examples.jsonl"),)
    config.update_from_flattened_dict(SMALL)
    config = read_config(config)
    data = read_data(config)
    batches = data.batches

    def with_events(start):
        for number, batch in enumerate(batches(start), start + 1):
            at.get(number, lambda: None)()
            yield batch

    object.__setattr__(data, "batches", with_events)
    return loop.run(config, data)()


def rows(workdir):
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_training_goes_on_and_saves_again_once_there_is_room(
    small_disk, examples, capfd
):
    # B052, B053, promise 3.
    workdir = small_disk / "run"
    seen = {}

    def look():  # before step 5: the save of step 4 has failed
        seen["saved"] = sorted(p.name for p in (workdir / "checkpoints").iterdir())
        seen["said"] = "".join(capfd.readouterr())

    at = {
        4: lambda: fill(workdir, after=2),
        5: look,
        7: lambda: (workdir / "ballast").unlink(),
    }

    assert train(workdir, examples, at=at) == 0

    assert "checkpoint step 4 not saved: disk full: 0 MiB free" in seen["said"]
    assert "last good step: 2" in seen["said"]
    assert seen["saved"] == ["2"]  # and nothing that was begun
    # Step 6 was due while the disk was full.
    assert list(steps.step_folders(workdir / "checkpoints")) == [8, 2]
    assert load_params(workdir)[1]["step"] == STEPS
    told = [r["step"] for r in rows(workdir) if "loss" in r]
    assert told == list(range(1, STEPS + 1))
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_last_save_that_fails_is_no_success(small_disk, examples, capfd):
    # B054: code 1, the last good step on screen, and exact weights of it.
    workdir = small_disk / "run"

    code = train(workdir, examples, at={6: lambda: fill(workdir, after=4)})

    said = "".join(capfd.readouterr())
    assert code == 1
    assert "error: checkpoint step 8 not saved: disk full" in said
    assert "last good step: 4" in said
    assert "Traceback" not in said
    assert load_params(workdir)[1]["step"] == 4
    names = sorted(p.name for p in (workdir / "checkpoints").iterdir())
    assert names == ["2", "4"]
