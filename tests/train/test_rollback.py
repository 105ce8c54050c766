"""Runs whose numbers go bad: back to the last good step, on with the next data, or out.

A token outside the vocabulary makes NaN of a whole step.
"""

import contextlib
import json
import os
import signal

import numpy as np
import pytest

from bitmamba.io.load import load_params
from bitmamba.paths import flatten
from bitmamba.train import bundle, loop
from bitmamba.train.start import read_config, read_data
from configs import sft

pytestmark = [pytest.mark.newest, pytest.mark.usefixtures("programs_compiled_once")]
STEPS = 10


def settings(workdir, **changes):
    """The bundled data, a model of one tiny layer; saves every second step."""
    config = sft.get_config("tiny")
    config.workdir = str(workdir)
    small = {
        "model.layers": "-",
        "model.d_model": 16,
        "model.mlp.d_ff": 16,
        "data.window": 32,
        "train.batch_size": 2,
        "train.steps": STEPS,
        "eval.max_windows": 2,
        "eval.every": STEPS,
        "eval.prompts": (),
        "checkpoint.every": 2,
        "checkpoint.init_from": None,
    }
    config.update_from_flattened_dict(small | changes)
    return read_config(config)


KNOWN = {}


def read_once(config):
    """The data of a run; all runs here have the same."""
    if config.data not in KNOWN:
        KNOWN[config.data] = read_data(config)
    return KNOWN[config.data]


class Crash(Exception):
    """Stands for a kill: nothing is saved or closed."""


def run(config, *, bad=(), crash=None, stop=None):
    """Train; `bad` steps get a token outside the vocabulary, `crash` is not reached.

    stop: the step during which the process is told to stop.
    """
    data = read_once(config)
    batches = type(data).batches.__get__(data)

    def poisoned(start):
        for number, batch in enumerate(batches(start), start + 1):
            if number == crash:
                raise Crash
            if number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            if number in bad:
                tokens = batch.tokens.copy()
                tokens[0, 0, 3] = config.model.vocab_size
                batch = batch._replace(tokens=tokens)
            yield batch

    object.__setattr__(data, "batches", poisoned)
    return loop.run(config, data)()


def rows(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def last(workdir):
    _, meta = load_params(workdir)
    assert meta["step"] == STEPS
    return meta


BAD = (5, 6, 7)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Three bad steps after the save of step 4; the run goes back to it, and on."""
    workdir = tmp_path_factory.mktemp("rollback") / "unbroken"
    with (
        workdir.with_suffix(".out").open("w") as out,
        contextlib.redirect_stdout(out),
    ):
        assert run(settings(workdir), bad=BAD) == 0
    return workdir


def test_the_run_goes_back_and_on_with_the_next_data_at_a_lower_rate(unbroken):
    found = rows(unbroken)

    (back,) = [r for r in found if "rolled_back_to" in r]
    assert (back["step"], back["rolled_back_to"]) == (7, 4)
    assert (back["rollbacks"], back["lr_scale"]) == (1, 0.5)
    assert "gradient of" in back["cause"]
    steps = [r for r in found if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert [r["step"] for r in steps if r["bad_in_row"]] == list(BAD)
    # The schedule counts updates: step 8 makes the fifth, warming up over ten.
    lr = {r["step"]: r["lr"] for r in steps}
    np.testing.assert_allclose(lr[8], 0.5 * 5 * lr[1], rtol=1e-6)
    extra = last(unbroken)["extra"]
    assert extra["guard"] == {"rollbacks": 1, "lr_scale": 0.5}
    assert (extra["bad_in_row"], extra["bad_total"]) == (0, 3)
    assert extra["n_losses"] == 7  # 1 to 4, then 8 to 10


@pytest.mark.once
def test_kills_and_stops_before_and_after_the_way_back_change_no_bit(
    unbroken, tmp_path, capsys
):
    workdir = tmp_path / "run"
    config = settings(workdir)
    # Told to stop among bad steps, it saves none of them.
    assert run(config, bad=BAD, stop=6) == 143
    assert "SIGTERM: step 4 is saved; the same command" in capsys.readouterr().out
    assert load_params(workdir)[1]["step"] == 4
    with pytest.raises(Crash):
        run(config, bad=BAD, crash=7)
    # Step 6 was due to be saved, but numbers were bad.
    assert not (workdir / "checkpoints" / "6").exists()
    with pytest.raises(Crash):
        run(config, bad=BAD, crash=10)

    assert run(config, bad=BAD) == 0

    ours, theirs = last(workdir), last(unbroken)
    assert ours["digests"] == theirs["digests"]
    assert ours["extra"] == theirs["extra"]
    told = [[r for r in rows(w) if "loss" in r] for w in (workdir, unbroken)]
    assert [r["loss"] for r in told[0]] == [r["loss"] for r in told[1]]


def test_it_is_told_on_the_console_and_in_the_summary(unbroken):
    shown = unbroken.with_suffix(".out").read_text()
    assert "guard: the update of a step is skipped" in shown
    assert "update skipped (3 in a row)" in shown
    assert "rolled back to the checkpoint of step 4; going on with the data of" in shown
    assert "skipped steps (bad numbers): 3" in shown
    assert "roll-backs: 1 (learning rate x 0.5 since the last)" in shown


def test_before_the_first_save_the_way_back_is_the_start(tmp_path, capsys):
    assert run(settings(tmp_path / "run"), bad=(1, 2, 3)) == 0

    assert "rolled back to the start: nothing was saved before" in (
        capsys.readouterr().out
    )
    assert last(tmp_path / "run")["extra"]["n_losses"] == STEPS - 3


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Every step from the fifth on is bad."""
    workdir = tmp_path_factory.mktemp("rollback") / "stopped"
    changes = {"train.max_bad_steps": 2, "guard.max_rollbacks": 1}
    code = run(settings(workdir, **changes), bad=range(5, STEPS + 1))
    return workdir, code


def test_after_the_last_way_back_the_run_ends_with_code_3_and_a_bundle(stopped):
    workdir, code = stopped

    assert code == 3
    assert max(r["step"] for r in rows(workdir)) == 8
    folder = workdir / "bundles" / "step_7"  # the first of the last row
    names = ["batch.safetensors", "bundle.json", "documents.jsonl", "state.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == names
    info = json.loads((folder / "bundle.json").read_text())
    assert (info["step"], info["lr_scale"]) == (7, 0.5)
    assert info["versions"]["jax"]
    assert info["config"]["train"]["max_bad_steps"] == 2
    lines = (folder / "documents.jsonl").read_text().splitlines()
    texts = [json.loads(line) for line in lines]
    assert all(t["text"] and t["trained"] <= t["tokens"] for t in texts)


def test_a_bundle_holds_the_very_step(stopped):
    workdir, _ = stopped

    found = bundle.read(workdir / "bundles" / "step_7")

    assert int(found.state.step) == 6
    vocab_size = found.config.model.vocab_size
    assert np.argwhere(np.asarray(found.batch.tokens) == vocab_size).tolist() == [
        [0, 0, 3]
    ]
    saved, meta = load_params(workdir)
    assert meta["step"] == 6  # saved after the way back to step 4
    for path, leaf in flatten(saved).items():
        np.testing.assert_array_equal(flatten(found.state.trainable)[path], leaf)
    assert float(found.held.hyper.lr) == pytest.approx(0.5 * 1e-2)


def test_the_replay_command_names_the_token(stopped, script, capsys):
    code = script("replay_step").show(str(stopped[0] / "bundles" / "step_7"))

    shown = capsys.readouterr().out
    assert code == 3
    assert "bundle of step 7, which was bad: gradient of" in shown
    assert "layer: embed" in shown
    assert "token: id 4096 at position 3 of row 0, batch 0" in shown
    assert "in a document of " in shown
    assert "likely cause: token id 4096 (smallest" in shown


@pytest.mark.parametrize("damage", ["gone", "cut", "wrong"])
def test_a_bundle_that_is_not_whole_is_refused_in_one_line(stopped, tmp_path, damage):
    import shutil

    folder = tmp_path / "step_7"
    shutil.copytree(stopped[0] / "bundles" / "step_7", folder)
    state = folder / "state.safetensors"
    if damage == "gone":
        (folder / "bundle.json").unlink()
    elif damage == "cut":
        state.write_bytes(state.read_bytes()[:-100])
    else:
        shutil.copy(folder / "batch.safetensors", state)

    with pytest.raises(ValueError, match=r"bundle .*: (no bundle.json|damaged)") as e:
        bundle.read(folder)

    assert "\n" not in str(e.value)


def test_a_held_out_loss_that_is_not_finite_leads_back_too(tmp_path, monkeypatch):
    from bitmamba.train import records

    evaluate, calls = records.evaluate, []

    def once_nan(*args, **kwargs):
        calls.append(1)
        result = evaluate(*args, **kwargs)
        # 1: before step 1. 2: at step 5, of parameters that must not be kept.
        return result | {"eval/loss": float("nan")} if len(calls) == 2 else result

    monkeypatch.setattr(records, "evaluate", once_nan)
    config = settings(tmp_path / "run", **{"eval.every": 5})

    assert run(config) == 0

    (back,) = [r for r in rows(tmp_path / "run") if "rolled_back_to" in r]
    assert (back["step"], back["rolled_back_to"]) == (5, 4)
    assert back["cause"] == "eval/loss is not finite"
