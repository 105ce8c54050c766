"""A sweep told to stop goes on to the bits of the unbroken one; another is refused."""

import dataclasses
import json
import os
import shutil
import signal

import jax
import pytest
from sweep_cases import STEPS, Data, make_config, run_sweep

from bitmamba.config import CheckpointConfig, EvalConfig
from bitmamba.io.load import load_trainable
from bitmamba.train import restore
from bitmamba.train.divergence import Limits

pytestmark = [pytest.mark.newest, pytest.mark.usefixtures("programs_compiled_once")]


class Told(Data):
    """SIGTERM comes with the given batch, or while the given evaluation is read."""

    def __init__(self, *, batch=0, evaluation=0):
        super().__init__()
        self.batch = batch
        self.eval_sft = Windows(self.eval_sft)
        self.eval_sft.told_at = evaluation

    def batches(self, start_step):
        for number, batch in enumerate(super().batches(start_step), start=1):
            if number == self.batch:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


class Windows(tuple):
    read = 0

    def __iter__(self):
        self.read += 1
        if self.read == self.told_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__iter__()


# The last one diverges at step 2, so that its state is not saved.
RESUMED = {"lr": ["1e-3", "1e-2", "30"]}
LIMITS = Limits(factor=1.01)


def resumed_config():
    return dataclasses.replace(
        make_config(),
        eval=EvalConfig(every=1),
        checkpoint=CheckpointConfig(every=3),
    )


def ends(folder):
    """All that a sweep leaves, but for the time it took."""
    _, meta = load_trainable(folder)
    found = json.loads((folder / "sweep.json").read_text())
    for times in (found, meta["extra"]):
        times.pop("seconds")
    return found, meta["step"], meta["digests"], meta["extra"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Folders of sweeps to which nothing happened, by how their arms step."""
    folders = {}
    for how in ("in_turn", "together"):
        folder = folders[how] = tmp_path_factory.mktemp("sweep") / how
        code, _ = run_sweep(folder, resumed_config(), Data(), LIMITS, how, **RESUMED)
        assert code == 0
    found, step, digests, _ = ends(folders["in_turn"])
    assert found["arms"][2]["diverged"]["step"] == 2
    assert step == STEPS
    assert {path.split("/")[0] for path in digests["trainable"]} == {"arm_0", "arm_1"}
    return folders


@pytest.mark.parametrize(
    ("told", "how", "first"),
    [
        (Told(batch=2), "together", "not finished: at step 2"),
        # Of step 2 the second arm's; then that of the last step.
        (Told(evaluation=6), "in_turn", "not finished: at step 2"),
        (Told(evaluation=10), "in_turn", "not finished: at step 4"),
    ],
    ids=["step 2, together", "an evaluation", "the last one"],
)
def test_a_sweep_told_to_stop_goes_on_to_the_same_bits(
    tmp_path, capsys, unbroken, told, how, first
):
    config = resumed_config()

    code, found = run_sweep(tmp_path, config, told, LIMITS, how, **RESUMED)
    assert code == 143
    assert found["arms"][0]["verdict"] == first
    assert found["findings"] == []
    shown = capsys.readouterr().out
    assert f"SIGTERM: saved step {found['done']}; the same command goes on" in shown

    data = Data()
    assert run_sweep(tmp_path, config, data, LIMITS, how, **RESUMED)[0] == 0
    assert data.read == STEPS - found["done"]
    assert ends(tmp_path) == ends(unbroken[how])
    line = f"step {found['done']} of {STEPS} of {tmp_path}; "
    assert line in capsys.readouterr().out


@pytest.fixture
def done(unbroken, tmp_path):
    """A sweep that is done, to be called again: again(data, config, limits, lists)."""
    shutil.copytree(unbroken["in_turn"], tmp_path, dirs_exist_ok=True)

    def again(data=None, *, config=None, limits=LIMITS, **lists):
        config, lists = config or resumed_config(), lists or RESUMED
        return run_sweep(tmp_path, config, data or Data(), limits, "in_turn", **lists)

    return again


def test_a_sweep_that_is_done_is_shown_again(done, unbroken, tmp_path, capsys):
    data = Data()

    assert done(data)[0] == 0

    assert data.read == 0
    assert ends(tmp_path) == ends(unbroken["in_turn"])
    shown = capsys.readouterr().out
    assert f"already done: step {STEPS} of {STEPS} of {tmp_path}; 2 of 3 arms" in shown
    assert "best: " in shown


@pytest.mark.once
def test_a_damaged_step_is_told_and_the_sweep_goes_on_from_the_one_before(
    done, unbroken, tmp_path, caplog
):
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS) / "opt_state")
    data = Data()

    assert done(data)[0] == 0

    assert data.read == 1
    assert ends(tmp_path) == ends(unbroken["in_turn"])
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"step {STEPS}: opt_state: " in line
    assert line.endswith("trying step 3")


def test_other_arms_data_and_settings_are_refused_by_name(done):
    def refused(match, *arguments, **settings):
        with pytest.raises(ValueError, match=match) as error:
            done(*arguments, **settings)
        assert str(error.value).endswith("or begin a new sweep with another --out")

    lrs = r"--lr changed: got \[0\.001, 0\.01\]; expected \[0\.001, 0\.01, 30\.0\] as"
    refused(lrs, lr=["1e-3", "1e-2"])
    refused("--wd changed", **RESUMED, wd=["0", "0.1"])
    refused("--factor changed", limits=Limits(factor=1.5))
    every = dataclasses.replace(resumed_config(), eval=EvalConfig(every=2))
    refused("eval.every changed: got 2; expected 1 as saved", config=every)
    data = Data()
    data.fingerprints = {"data": "others"}
    refused("data changed: got others; expected of this test", data)


def test_another_base_is_refused(done, monkeypatch):
    base_params = restore.base_params

    def other(*arguments):
        return jax.tree.map(lambda x: x + 1, base_params(*arguments))

    monkeypatch.setattr(restore, "base_params", other)

    with pytest.raises(ValueError, match="seed 0 is not the base that this sweep"):
        done()
