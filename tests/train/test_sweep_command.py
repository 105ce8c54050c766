"""scripts/sweep.py: mistakes are one sentence before JAX loads, and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lr="], "error: --lr: got an empty list; expected numbers, as --lr=1e-4"),
        (["--lr=1e-3", "--arms=both"], "error: --arms: got 'both'; expected auto"),
        (["--lr=1e-3", "--factor=1"], "error: --factor: got 1; expected a number abov"),
        (
            ["--lr=1e-3", "--rank=8", "--config=configs/sft.py"],
            "error: --rank: got 8 with train.mode=full, which has no adapters",
        ),
    ],
)
def test_a_mistake_is_one_sentence(args, message):
    done = subprocess.run(
        [sys.executable, "scripts/sweep.py", "--config=configs/lora.py", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )

    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_help_states_when_an_arm_has_diverged():
    done = subprocess.run(
        [sys.executable, "scripts/sweep.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert done.returncode == 0, done.stderr
    assert "An arm has diverged when its loss or gradient was not finite" in done.stdout
    assert "--factor: A loss above factor x its start is high." in done.stdout
