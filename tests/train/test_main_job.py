"""The main job as its user runs it: train, be killed, resume, look at the results.

Its processes compile as a user's do, and each program once: tests/conftest.py.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bitmamba.io.checkpoint import load_params
from bitmamba.paths import flatten
from bitmamba.train import build, loop
from bitmamba.train.start import read_config, read_data
from configs import sft

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "model.layers": "M-",
    "model.d_model": 32,
    "model.mamba2.headdim": 16,
    "model.mamba2.d_state": 8,
    "model.mlp.d_ff": 32,
    "data.window": 64,
    "train.batch_size": 2,
    "train.accumulation": 4,  # and long enough that a signal comes before the end
    "eval.max_windows": 2,
    "eval.every": 4,
    "eval.sample_tokens": 4,
    "checkpoint.every": 3,
    "checkpoint.init_from": "",
    "eval.prompts": (),
}


def command(workdir, *more, config="sft"):
    return [
        sys.executable,
        str(ROOT / "train.py"),
        f"--config={ROOT}/configs/{config}.py",
        f"--config.workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in SMALL.items()),
        *more,
    ]


def train(workdir, *more, config="sft"):
    return subprocess.run(
        command(workdir, *more, config=config),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_here(workdir, changes):
    """The exit code of a run in this process: no JAX to start, little to compile."""
    config_dict = sft.get_config()
    settings = SMALL | {"workdir": str(workdir)} | changes
    config_dict.update_from_flattened_dict(settings)
    config = read_config(config_dict)
    return loop.run(config, read_data(config))()


def rows(workdir):
    text = (Path(workdir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def unbroken(base):
    """Eight steps in one go."""
    prompts = "--config.eval.prompts=('What is a kludge?',)"
    done = train(base / "unbroken", "--config.train.steps=8", prompts)
    assert done.returncode == 0, done.stdout + done.stderr
    return base / "unbroken", done.stdout


def test_the_run_leaves_what_the_contract_promises(unbroken):
    workdir, shown = unbroken
    found = rows(workdir)

    steps = [r["step"] for r in found if "loss" in r]
    assert steps == list(range(1, 9))
    assert all(r["tokens_per_s"] > 0 for r in found if "loss" in r)
    evaluations = [r for r in found if "eval/loss" in r]
    assert [r["step"] for r in evaluations] == [0, 4, 8]
    assert found[0]["step"] == 0
    for row in evaluations:
        assert row["retention/base_loss"] == evaluations[0]["retention/loss"]
        assert any(k.count("/") == 2 and k.startswith("eval/") for k in row)
    assert any("train/replay/loss" in r for r in found)
    assert json.loads((workdir / "config.json").read_text())["train"]["steps"] == 8
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["6", "8"]
    assert (workdir / "loss.png").stat().st_size > 1000
    assert "starts from: random parameters of seed 0" in shown
    for phrase in ("parameters", "held out", "memory", "retention", "metrics.jsonl"):
        assert phrase in shown


@pytest.mark.newest
def test_a_kill_a_sigterm_and_the_rest_are_bit_equal_to_all_at_once(base, unbroken):
    # B041, B042, B044, B059: the same parameters and optimiser state, bit for bit.
    workdir = base / "broken"
    metrics = workdir / "metrics.jsonl"

    def start():
        return subprocess.Popen(
            command(workdir, "--config.train.steps=8"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    running = start()
    wait_for(lambda: metrics.exists() and '"step": 1' in metrics.read_text(), running)
    running.send_signal(signal.SIGTERM)
    shown, _ = running.communicate(timeout=120)
    assert running.returncode == 143
    assert "SIGTERM: saved step" in shown
    stopped = max(row["step"] for row in rows(workdir) if "loss" in row)
    running = start()
    wait_for(lambda: latest_save(workdir) > stopped, running)
    running.send_signal(signal.SIGKILL)
    running.communicate()

    done = train(workdir, "--config.train.steps=8")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on from step " in done.stdout
    assert digests(workdir) == digests(unbroken[0])
    assert loss_rows(workdir) == loss_rows(unbroken[0])
    assert [r["step"] for r in rows(workdir) if "eval/loss" in r] == [0, 4, 8]


def test_a_finished_run_is_not_run_again(unbroken, capsys, monkeypatch):
    workdir, _ = unbroken
    before = rows(workdir)
    monkeypatch.setattr(build, "compile_step", lambda *_: pytest.fail("compiled"))

    assert run_here(workdir, {"train.steps": 8}) == 0

    assert "already trained to step 8" in capsys.readouterr().out
    assert rows(workdir) == before


def test_a_changed_run_is_refused_in_one_line(unbroken):
    workdir, _ = unbroken

    done = train(workdir, "--config.train.steps=8", "--config.optim.lr=0.5")

    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "optim.lr changed: got 0.5; expected 0.01" in line
    assert "workdir" in line


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("data.window", 48, "plan"),
        ("model.norm_eps", 1e-6, r"model\.norm_eps"),
        ("data.tokenizer", "bytes", "tokenizer"),
        (
            "data.sft",
            ("assets:data/sft_scored.jsonl",),
            r"file assets:data/sft_prompt_response\.jsonl changed: got nothing",
        ),
    ],
    ids=lambda value: str(value) if "." in str(value) else "",
)
def test_whatever_changed_is_named(unbroken, setting, value, named):
    workdir, _ = unbroken

    with pytest.raises(ValueError, match=named) as refused:
        run_here(workdir, {"train.steps": 8, setting: value})

    assert "workdir" in str(refused.value)


@pytest.mark.newest
def test_head_only_starts_from_a_checkpoint_and_moves_only_the_head(base, unbroken):
    source, _ = unbroken
    workdir = base / "head"

    changes = {"train.steps": 2, "train.mode": "head_only"}
    code = run_here(workdir, changes | {"checkpoint.init_from": str(source)})

    assert code == 0
    before, after = (flatten(load_params(p)[0]) for p in (source, workdir))
    changed = {k for k in before if not np.array_equal(before[k], after[k])}
    assert changed == {"lm_head/kernel"}


def test_the_dry_run_shows_everything_and_writes_nothing(base):
    workdir = base / "dry"

    done = train(workdir, "--dry_run", "--config.model.layers=-")

    assert done.returncode == 0, done.stdout + done.stderr
    for phrase in ("parameters", "trains (full)", "rows =", "peak of the compiled"):
        assert phrase in done.stdout
    assert not workdir.exists()


@pytest.mark.newest
def test_numbers_that_stay_bad_end_the_run_with_code_3(base, capsys):
    # B063: an absurd step size makes NaN soon; the run must not go on to the end.
    workdir = base / "bad"
    optim = {"name": "adamw", "lr": 1e30, "warmup_steps": 0, "schedule": "constant"}
    changes = {f"optim.{name}": value for name, value in optim.items()}

    code = run_here(workdir, changes | {"train.steps": 40, "model.layers": "-"})

    shown = capsys.readouterr().out
    assert code == 3
    assert "is not finite" in shown
    assert "numbers went bad" in shown
    assert max(r["step"] for r in rows(workdir)) < 40


def digests(workdir):
    """The leaf digests of the last checkpoint: parameters and optimiser state."""
    _, meta = load_params(workdir)
    assert meta["step"] == 8
    return meta["digests"]


def loss_rows(workdir):
    return [(r["step"], r["loss"]) for r in rows(workdir) if "loss" in r]


def latest_save(workdir):
    """The step of the last save that has begun."""
    names = [path.name.split(".")[0] for path in (workdir / "checkpoints").iterdir()]
    return max(int(name) for name in names if name.isdigit())


def wait_for(condition, process, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def generate(*more):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate.py"), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_generate_answers_from_the_run_and_refuses_bad_settings(unbroken):
    workdir, _ = unbroken
    asked = [f"--checkpoint={workdir}", "--prompt=What is a kludge?"]

    done = generate(*asked, "--max_tokens=3")
    refused = generate(*asked, "--top_p=1.5")

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert "top_p: got 1.5" in line


TEXT = "assets:data/replay.jsonl"


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "named", "note"),
    [
        (
            {"data.heldout_share": 0.0},
            "held-out replay text (no examples)",
            "no SFT example is held out (580 rows, heldout_share 0): eval/loss is that "
            "of held-out replay text; raise data.heldout_share or add examples",
        ),
        ({"data.sft": (), "data.replay": (TEXT,)}, "held-out text", None),
    ],
    ids=["examples", "text"],
)
def test_text_that_stands_in_for_examples_is_called_text(
    tmp_path, capsys, changes, named, note
):
    assert run_here(tmp_path, changes | {"train.steps": 1}) == 0

    shown = " ".join(capsys.readouterr().out.split())
    last = rows(tmp_path)[-1]
    assert last["eval/loss"] == last["retention/loss"]
    assert "held-out examples" not in shown
    assert re.search(rf"change {re.escape(named)} \d", shown)
    assert (note in shown) if note else ("is held out" not in shown)
