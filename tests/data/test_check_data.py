"""scripts/check_data.py as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import sft

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

    path = write(rows)
    done = check(f"--files={path}", "--tokenizer=bytes", "--window=64")

    # All is shown, and then refused as train.py would.
    assert done.returncode == 2
    assert "data.sft: 1 of 2 rows refused (50%); expected at most 20%" in done.stderr
    assert f"{path}:2: keys: prompt" in done.stderr
    assert "2 rows = 1 trained + 0 held out + 1 refused" in done.stdout
    assert "rows.jsonl:2: keys: prompt" in done.stdout
    shown = done.stdout.splitlines()
    assert r"0    <|user|>│q│\x1b│[│2│J│<|assistant|>" in shown
    assert "2    [│r│e│d│]│a│<|endoftext|>" in shown
    assert "\x1b" not in done.stdout


def test_files_are_filtered_by_score_as_the_default_config_does(write):
    row = {"prompt": "q", "completion": "a"}
    least = sft.get_config().data.min_score
    rows = [{**row, "score": score} for score in (least, least - 0.01)] + [row]
    files = f"--files={write(rows)}", "--tokenizer=bytes"

    done, lower = check(*files), check(*files, "--min_score=0.5")

    assert (done.returncode, lower.returncode) == (0, 0)
    assert "3 rows = 2 trained + 0 held out + 1 refused" in done.stdout
    assert "rows.jsonl:2: 0.59 < data.min_score = 0.6" in done.stdout
    assert "3 rows = 3 trained" in lower.stdout


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
        (["--files={path}", "--min_score=nan"], "--min_score: got nan"),
        (["--files={path}l"], "did you mean rows.jsonl?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(write, args, message):
    path = write(b"junk\n")

    done = check(*[a.replace("{path}", path) for a in args])

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
