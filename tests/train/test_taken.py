"""Runs and sweeps refuse a folder that is in use or is none, and leave no trace."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
from sweep_cases import Data, make_config, run_sweep

from bitmamba.config import CheckpointConfig, Rule
from bitmamba.io.lock import Lock
from bitmamba.train import build, loop


@pytest.fixture
def unbuilt(monkeypatch):
    """Nothing is built before a refusal."""
    monkeypatch.setattr(build, "build_parts", lambda *_: pytest.fail("built"))


def run(workdir, **changes):
    changes |= {"workdir": str(workdir)}
    return loop.run(dataclasses.replace(make_config(), **changes), Data())


def sweep(out):
    return run_sweep(out, make_config(), Data(), lr=["1e-3"])


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("start", "setting"), [(run, "config.workdir"), (sweep, "--out")]
)
def test_a_folder_in_use_is_refused_before_anything_is_read_or_written(
    start, setting, tmp_path
):
    old = tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp"  # of the other's save
    old.mkdir(parents=True)
    other = Lock()
    other.take(tmp_path, setting="config.workdir")

    with other, pytest.raises(ValueError, match="another run") as refused:
        start(tmp_path)

    assert str(refused.value).startswith(
        f"{setting}: got {tmp_path}, where another run trains now (pid {os.getpid()} on"
    )
    assert str(refused.value).endswith(f"stop that one, or set {setting}")
    assert old.exists()


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("start", "setting"), [(run, "config.workdir"), (sweep, "--out")]
)
def test_a_file_in_its_place_is_refused(start, setting, tmp_path):
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(ValueError, match="not a folder") as refused:
        start(file)

    assert str(refused.value).startswith(f"{setting}: got {file} (not a folder)")


def test_a_refused_run_leaves_nothing_and_the_folder_is_free(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    account = SimpleNamespace(epochs=1.0, lines=list)
    monkeypatch.setattr(Data, "account", account)
    optim = dataclasses.replace(make_config().optim, rules=(Rule(pattern=".*"),))
    checkpoint = CheckpointConfig(init_from=str(tmp_path / "nowhere"))

    for _ in range(2):
        with pytest.raises(ValueError, match="nowhere"):
            run(workdir, checkpoint=checkpoint, optim=optim)

    assert not workdir.exists()
