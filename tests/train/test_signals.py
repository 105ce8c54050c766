"""The first signal asks, the second ends; a stuck step ends with its stacks shown."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT)}

# Compiled code in which Python's handlers do not run: one long call into C.
BUSY = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'a', b'b', 200_000_000)"


def start(code):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_the_first_signal_only_asks(name):
    child = start(
        "import time\n"
        "from bitmamba.train.signals import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop.received: time.sleep(0.01)\n"
        "print('saved after', stop.received)\n"
    )
    child.stdout.readline()

    child.send_signal(getattr(signal, name))

    shown, errors = child.communicate(timeout=20)
    assert (child.returncode, errors) == (0, "")
    assert shown == f"saved after {name}\n"


def test_the_second_ends_at_once_even_in_compiled_code():
    child = start(
        "from bitmamba.train.signals import StopSignal\n"
        "with StopSignal():\n"
        "    print('ready', flush=True)\n"
        f"    {BUSY}\n"
    )
    child.stdout.readline()

    child.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.3)
    child.send_signal(signal.SIGUSR1)

    shown, _ = child.communicate(timeout=5)
    assert child.returncode == 128 + signal.SIGUSR1
    assert "second signal: left at once" in shown


def test_before_the_first_step_one_signal_is_enough_even_in_compiled_code():
    child = start(
        "from bitmamba.train.signals import StopSignal\n"
        "with StopSignal(at_once=143):\n"
        "    print('ready', flush=True)\n"
        f"    {BUSY}\n"
    )
    child.stdout.readline()

    child.send_signal(signal.SIGINT)

    shown, errors = child.communicate(timeout=5)
    assert (child.returncode, errors) == (143, "")
    assert shown == "SIGINT: left before the first step\n"


def test_handlers_are_as_before_afterwards():
    from bitmamba.train.signals import StopSignal

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal():
        pass

    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def watched(seconds, rest, workdir):
    child = start(
        "import time\n"
        "from bitmamba.train.watchdog import Watchdog\n"
        f"with Watchdog({seconds}, {str(workdir)!r}) as dog:\n"
        "    dog.beat('step 7')\n"
        f"    {rest}\n"
        "print('done')\n"
    )
    return *child.communicate(timeout=30), child.returncode


def test_a_stuck_step_ends_with_a_line_and_the_stacks(tmp_path):
    # B102: alive, but nothing gets done.
    shown, errors, code = watched(0.3, "time.sleep(60)", tmp_path)

    assert (shown, code) == ("", 1)
    assert errors.startswith("error: stuck for 0.3 s in step 7 (config.guard.stuck_s)")
    assert "most recent call first" in errors
    assert 'File "<string>", line 5' in errors
    assert (tmp_path / "stuck.txt").read_text().startswith("error: stuck for 0.3 s")


@pytest.mark.parametrize("seconds", [0.5, 0])
def test_signs_of_life_keep_a_run_going_and_0_watches_nothing(tmp_path, seconds):
    shown, errors, code = watched(
        seconds,
        "[(time.sleep(0.1), dog.beat('a step')) for _ in range(10)]"
        if seconds
        else "time.sleep(0.5)",
        tmp_path,
    )

    assert (shown, errors, code) == ("done\n", "", 0)
