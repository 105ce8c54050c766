"""Jobs in processes of their own, to be killed, told to stop, and compared."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bitmamba.io.load import load_trainable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SMALL = {
    "model.layers": "M-",
    "model.d_model": 16,
    "model.vocab_size": 300,
    "model.mamba2.headdim": 16,
    "model.mamba2.d_state": 4,
    "model.mlp.d_ff": 16,
    "data.tokenizer": "bytes",
    "data.window": 32,
    "data.replay_share": 0.0,
    "data.min_score": None,
    "train.batch_size": 2,
    "eval.max_windows": 2,
    "eval.prompts": "()",
}


@pytest.fixture(autouse=True, scope="module")
def _compiled_once(programs_compiled_once):
    """For all files here."""


def config_flags(workdir, config, settings):
    """Of a command line."""
    return [
        f"--config={ROOT}/configs/{config}.py",
        f"--config.workdir={workdir}",
        *(f"--config.{k}={'' if v is None else v}" for k, v in settings.items()),
    ]


class Job:
    """A run of slow_train.py in a work directory; what it prints is in `shown`."""

    def __init__(
        self,
        workdir,
        config,
        settings,
        *,
        wait_s=0.05,
        environment=None,
        label="",
        arguments=(),
    ):
        self.workdir = Path(workdir)
        self.workdir.parent.mkdir(parents=True, exist_ok=True)
        self._out = self.workdir.with_name(f"{self.workdir.name}{label}.out")
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "slow_train.py"),
                    *config_flags(self.workdir, config, settings),
                    *arguments,
                ],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "SLOW_TRAIN_S": str(wait_s),
                    "XLA_FLAGS": "--xla_backend_optimization_level=0",
                    **(environment or {}),
                },
            )

    @property
    def shown(self):
        return self._out.read_text()

    def wait_for(self, condition, *, timeout_s=120):
        end = time.monotonic() + timeout_s
        while not condition(self):
            assert self.process.poll() is None, f"ended too early:\n{self.shown}"
            assert time.monotonic() < end, f"nothing happened in time:\n{self.shown}"
            time.sleep(0.002)

    def send(self, number):
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        return self.end()

    def end(self):
        return self.process.wait(timeout=180)


def rows(workdir):
    path = Path(workdir) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_at(step):
    """Whether a job has recorded a training step."""
    return lambda job: any(r["step"] >= step and "loss" in r for r in rows(job.workdir))


def compiles(job):
    return "evaluates every" in job.shown


def saves(job):
    folder = job.workdir / "checkpoints"
    return folder.exists() and any("orbax-checkpoint-tmp" in p for p in names(folder))


def names(folder):
    return [p.name for p in folder.iterdir()]


def final(workdir, step):
    """All that must be equal at the end: parameters, optimiser, counts, losses."""
    _, meta = load_trainable(workdir)
    assert meta["step"] == step
    losses = [(r["step"], r["loss"]) for r in rows(workdir) if "loss" in r]
    evaluations = [
        (r["step"], r["eval/loss"]) for r in rows(workdir) if "eval/loss" in r
    ]
    return meta["digests"], meta["extra"], losses, evaluations


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """A file of examples, and one of plain text."""
    folder = tmp_path_factory.mktemp("data")
    with (folder / "examples.jsonl").open("w") as file:
        for i in range(40):
            row = {"prompt": f"What is {i} and {i}?", "completion": f"It is {2 * i}."}
            file.write(json.dumps(row) + "\n")
    with (folder / "text.jsonl").open("w") as file:
        for i in range(40):
            file.write(json.dumps({"text": f"Line {i} of a plain text."}) + "\n")
    return folder


@pytest.fixture(scope="session")
def jobs(examples):
    """Everything in this file, for the tests; `start(workdir, config, **settings)`.

    `flags` of the same are those of its command line, for a run in this process.
    """

    def merged(config, settings):
        files = {
            "data.sft": "" if config == "warmup" else examples / "examples.jsonl",
            "data.replay": examples / "text.jsonl" if config == "warmup" else "",
            "data.heldout_replay": "",
            "checkpoint.init_from": None,
        }
        return {
            **SMALL,
            **files,
            **{k.replace("__", "."): v for k, v in settings.items()},
        }

    def flags(workdir, config="sft", **settings):
        return config_flags(workdir, config, merged(config, settings))

    def start(
        workdir,
        config="sft",
        *,
        wait_s=0.05,
        environment=None,
        label="",
        arguments=(),
        **settings,
    ):
        return Job(
            workdir,
            config,
            merged(config, settings),
            wait_s=wait_s,
            environment=environment,
            label=label,
            arguments=arguments,
        )

    return SimpleNamespace(
        start=start,
        flags=flags,
        rows=rows,
        is_at=is_at,
        compiles=compiles,
        saves=saves,
        names=names,
        final=final,
    )
