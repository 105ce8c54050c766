"""A folder has one run at a time, whatever became of the one before."""

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from absl import logging

from bitmamba.io import lock
from bitmamba.io.lock import Lock

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import sys
from bitmamba.io.lock import Lock
mine = Lock()
mine.take(sys.argv[1], setting="config.workdir")
print("taken", flush=True)
sys.stdin.read()
"""


def take(folder):
    mine = Lock()
    mine.take(folder, setting="config.workdir")
    return mine


@pytest.fixture
def owner(tmp_path):
    """Another process, which has tmp_path/run."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_the_second_process_is_told_who_has_it_and_a_kill_frees_it(owner, tmp_path):
    folder = tmp_path / "run"
    who = f"{re.escape(str(folder))}, where another run trains now .pid {owner.pid} on "

    with pytest.raises(ValueError, match=f"config.workdir: got {who}"):
        take(folder)

    owner.kill()
    owner.wait()
    assert (folder / lock.NAME).exists()
    with take(folder), pytest.raises(ValueError, match=f"pid {os.getpid()} on "):
        take(folder)


def test_released_it_can_be_taken_again_and_leaves_only_what_was_written(tmp_path):
    folder = tmp_path / "runs" / "a"
    with take(folder):
        assert folder.is_dir()
    assert not folder.exists()  # made for nothing

    with take(folder):
        (folder / "metrics.jsonl").touch()
    assert os.listdir(folder) == ["metrics.jsonl"]

    mine = Lock()
    mine.take(folder, setting="config.workdir")
    with pytest.raises(KeyError), mine.released_on_error():
        {}["failed"]
    kept = Lock()
    with kept.released_on_error():
        kept.take(folder, setting="config.workdir")
    with pytest.raises(ValueError, match="another run trains"):
        take(folder)
    del kept  # prepared, and never trained
    take(folder).release()
    assert os.listdir(folder) == ["metrics.jsonl"]


def test_a_file_that_its_owner_removed_meanwhile_is_not_the_lock(tmp_path, monkeypatch):
    real, calls = fcntl.flock, []

    def slow(fd, how):
        calls.append(fd)
        if len(calls) == 1:  # the owner leaves between our open and our lock
            (tmp_path / lock.NAME).unlink()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow)

    with take(tmp_path), pytest.raises(ValueError, match="another run trains"):
        take(tmp_path)

    assert len(calls) == 3


def test_without_locks_one_line_warns_and_the_run_goes_on(tmp_path, monkeypatch):
    def no_locks(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    lines = []
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(logging, "warning", lambda *args: lines.append(args))
    with take(tmp_path), take(tmp_path):
        pass
    assert len(lines) == 2

    monkeypatch.setattr(lock, "fcntl", None)  # as on Windows
    with take(tmp_path / "new"), take(tmp_path / "new"):
        assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "not a folder"),
        ("file/run", "Not a directory"),
        ("/proc/run", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_setting(
    folder, reason, tmp_path
):
    if folder.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc")
    (tmp_path / "file").touch()
    path = tmp_path / folder  # an absolute one stays as it is

    with pytest.raises(ValueError, match="can be made and written") as refused:
        take(path)

    assert str(refused.value) == (
        f"config.workdir: got {path} ({reason}); expected a folder that can be made "
        "and written; set config.workdir"
    )
