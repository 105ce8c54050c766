"""scripts/check_data.py as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(*args):
    return subprocess.run(
        [sys.executable, "scripts/check_data.py", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )


def test_rows_are_accounted_for_and_shown_with_their_weights(write):
    rows = [
        {"prompt": "q\u001b[2J", "completion": "[red]a", "weight": 2},
        {"prompt": "no answer"},
    ]

    done = check(f"--files={write(rows)}", "--tokenizer=bytes", "--window=64")

    assert done.returncode == 0, done.stderr
    assert "2 rows = 1 trained + 0 held out + 1 refused" in done.stdout
    assert "rows.jsonl:2: keys: prompt" in done.stdout
    shown = done.stdout.splitlines()
    assert r"0    <|user|>│q│\x1b│[│2│J│<|assistant|>" in shown
    assert "2    [│r│e│d│]│a│<|endoftext|>" in shown
    assert "\x1b" not in done.stdout


def test_the_default_config_is_shown():
    done = check("--config=configs/sft.py", "--examples=1")

    assert done.returncode == 0, done.stderr
    assert "plan: " in done.stdout
    assert "example 1, " in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "expected either --config=FILE or --files=A,B"),
        (["--files=none.jsonl"], "got 'none.jsonl' (no such file)"),
        (["--files={path}", "--tokenizer=bytes"], "nothing left to train"),
        (["--files={path}", "--tokenizr=bytes"], "tokenizr"),
        (["--files={path}l"], "did you mean rows.jsonl?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(write, args, message):
    path = write(b"junk\n")

    done = check(*[a.replace("{path}", path) for a in args])

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
