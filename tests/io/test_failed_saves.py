"""A save that fails is told within a step, and costs nothing that was good."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from bitmamba.io import steps, store

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def files_of_at_most(n_bytes):
    """Writing more to a file fails, as on a full disk (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_to_save(toy, checkpointer, step):
    """Save a step while the disk refuses it; what the next polls say."""
    with files_of_at_most(64):
        toy.save(checkpointer, step)
        deadline = time.monotonic() + 30
        while not (line := checkpointer.poll()) and time.monotonic() < deadline:
            time.sleep(0.01)
    return line


def test_told_at_the_next_poll(toy, open_checkpointer, tmp_path, capfd):
    """B052: one line with step, reason and last good step; no traceback anywhere."""
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1)
    checkpointer.wait()

    line = fail_to_save(toy, checkpointer, 2)

    assert line.startswith("checkpoint step 2 not saved: ")
    assert "File too large" in line
    assert line.endswith("last good step: 1")
    assert "\n" not in line
    assert checkpointer.poll() is None
    assert "Traceback" not in "".join(capfd.readouterr())


def test_nothing_is_left_behind_and_training_goes_on(toy, open_checkpointer, tmp_path):
    """B053: the failed step is never offered, and can be saved later."""
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 10)
    checkpointer.wait()

    fail_to_save(toy, checkpointer, 20)

    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["10"]
    assert checkpointer.last_good() == 10
    toy.assert_is_step(toy.restore(checkpointer), 10)
    toy.save(checkpointer, 12)
    assert checkpointer.wait() is None
    toy.assert_is_step(toy.restore(checkpointer), 12)
    checkpointer.close()


def test_the_step_saved_before_survives_a_failed_second_save(toy, open_checkpointer):
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 5)
    checkpointer.wait()

    fail_to_save(toy, checkpointer, 5)

    toy.assert_is_step(toy.restore(checkpointer), 5)


def test_close_raises_if_the_last_save_failed(toy, open_checkpointer):
    """B054: the run must not end as a success."""
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1)
    checkpointer.wait()
    fail_to_save(toy, checkpointer, 2)

    with pytest.raises(OSError, match=r"step 2 not saved.*last good step: 1$"):
        checkpointer.close()


def test_a_start_that_fails_is_told_too(toy, open_checkpointer, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no threads left\nsecond line")

    checkpointer = open_checkpointer()
    monkeypatch.setattr(store, "start_write", refuse)

    toy.save(checkpointer, 3)

    assert checkpointer.poll() == (
        "checkpoint step 3 not saved: no threads left second line; no step is saved yet"
    )


def test_a_full_disk_is_seen_before_writing(toy, open_checkpointer, monkeypatch):
    usage = namedtuple("usage", "total used free")
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(steps.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))

        toy.save(checkpointer, 2)

        assert "not saved: disk full: 0 MiB free" in checkpointer.poll()
    assert checkpointer.last_good() == 1


def test_frozen_parameters_that_cannot_be_saved(toy, open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()

    with files_of_at_most(64), pytest.raises(OSError, match=r"frozen-.*: not saved"):
        checkpointer.save_frozen(toy.make_trainable(1))

    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_a_failed_save_still_writes_is_removed_too(tmp_path, monkeypatch):
    folder = tmp_path / "1.orbax-checkpoint-tmp-0"
    folder.mkdir()
    rmtree, calls = shutil.rmtree, []

    def with_a_thread_that_writes(path, **kwargs):
        rmtree(path, **kwargs)
        calls.append(path)
        if len(calls) < 3:
            path.mkdir()
            (path / "late").touch()

    monkeypatch.setattr(steps.shutil, "rmtree", with_a_thread_that_writes)

    steps.tidy(tmp_path)

    assert list(tmp_path.iterdir()) == []
    assert calls == [folder] * 3


KILLED = """
import sys
import jax.numpy as jnp
from bitmamba.io.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1], keep=2, fingerprints={}, config={})
for step in range(1, 10_000):
    trainable = {"w": jnp.full((512, 512), step, jnp.float32)}
    checkpointer.save(
        step, trainable=trainable, opt_state=(), frozen_digests={}, extra={}
    )
    print(step, flush=True)
"""


def test_kill_in_a_save(open_checkpointer, tmp_path):
    """B059: killed with a save under way, the newest finished step is whole."""
    import jax.numpy as jnp

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "checkpoints")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
        while int(child.stdout.readline()) < 5:
            pass
        child.send_signal(signal.SIGKILL)

    checkpointer = open_checkpointer(fingerprints={})
    restored = checkpointer.restore_latest({"w": jnp.zeros((512, 512))}, ())

    assert restored.step >= 4
    assert (restored.trainable["w"] == restored.step).all()
    assert next(iter(steps.step_folders(tmp_path / "checkpoints"))) == restored.step
