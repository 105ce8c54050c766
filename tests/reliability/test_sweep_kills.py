"""A sweep killed at any moment ends on the verdicts and bits of the unbroken one."""

import json
import random
import signal
import sys
import time

import pytest
from absl import flags
from ml_collections import config_flags

from bitmamba.io.load import load_trainable
from bitmamba.train import sweep
from bitmamba.train.arms import make_arms
from bitmamba.train.divergence import Limits
from bitmamba.train.start import read_config, read_data

STEPS = 12
RUN = {
    "train__steps": STEPS,
    "checkpoint__every": 3,
    "eval__every": 4,
    "model__layers": "-",
    "optim__schedule": "constant",
    "loss__tmkl": 0.0,
}
# The highest rate's updates are infinite: its arms are dropped at step 3.
LRS = ("1e-3", "1e-2", "1e30")
pytestmark = pytest.mark.xdist_group("sweep kills")


def start(jobs, workdir, *arguments, wait_s=0.05, **environment):
    environment["SLOW_TRAIN_SCRIPT"] = "scripts.sweep"
    return jobs.start(
        workdir,
        "lora",
        wait_s=wait_s,
        environment=environment,
        arguments=arguments,
        **RUN,
    )


def final(workdir):
    """All that a sweep leaves, but for the time it took and the command it names."""
    _, meta = load_trainable(workdir / "sweep")
    assert meta["step"] == STEPS
    found = json.loads((workdir / "sweep" / "sweep.json").read_text())
    del found["seconds"], found["command"], meta["extra"]["seconds"]
    return found, meta["digests"], meta["extra"]


def saves(job):
    folder = job.workdir / "sweep" / "checkpoints"
    return folder.exists() and any("checkpoint-tmp" in f.name for f in folder.iterdir())


def steps_shown(job):
    return job.shown.count(f"/{STEPS}  ")


def run_here(jobs, workdir):
    """The same sweep in this process: only what is killed needs one of its own."""
    values = flags.FlagValues()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sweep", *jobs.flags(workdir, "lora", **RUN)])
        config_flags.DEFINE_config_file("config", flag_values=values)
        values(sys.argv)
    config = read_config(values.config)
    code = sweep.run(
        make_arms(config, lr=LRS),
        read_data(config),
        how="auto",
        limits=Limits(),
        out=workdir / "sweep",
        command=lambda arm: "",
    )()
    assert code == 0
    return final(workdir)


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@pytest.mark.slow
def test_a_sweep_killed_in_a_save_ends_as_if_it_was_not(jobs, tmp_path, capsys):
    unbroken = run_here(jobs, tmp_path / "unbroken")
    found = unbroken[0]
    assert [bool(arm["diverged"]) for arm in found["arms"]] == [False, False, True]
    workdir = tmp_path / "run"

    job = start(jobs, workdir, f"--lr={','.join(LRS)}", wait_s=0.15)
    # Any save but the first, or the moment after it: the last one is far.
    job.wait_for(lambda job: 4 <= steps_shown(job) <= 10 and saves(job))
    job.send(signal.SIGKILL)

    capsys.readouterr()
    assert run_here(jobs, workdir) == unbroken
    assert "resuming at step " in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_killed_at_twelve_random_moments(jobs, tmp_path):
    """Two ranks, two decays: eight arms in two programs."""
    arms = ("--lr=1e-2,1e30", "--wd=0,0.1", "--rank=2,3")
    job = start(jobs, tmp_path / "whole", *arms, wait_s=0)
    assert job.end() == 0, job.shown
    rng, kills, runs = random.Random(2), [], 0
    while len(kills) < 12:
        runs += 1
        workdir = tmp_path / f"run{runs}"
        kills += random_kills(jobs, workdir, arms, rng)
        assert final(workdir) == final(tmp_path / "whole")
    counts = {kind: kills.count(kind) for kind in sorted(set(kills))}
    print(f"{len(kills)} kills in {runs} sweeps: {counts}")


def random_kills(jobs, workdir, arms, rng):
    """Kill a sweep until one process lives to the end; in what each was killed."""
    kills = []
    while True:
        job = start(jobs, workdir, *arms, SLOW_TRAIN_COMPILES="always")
        after, longest_s = rng.choice(
            [
                (lambda job: True, 3.0),
                (lambda job: "compiled" in job.shown, 1.0),
                (lambda job: "step 0, every arm" in job.shown, 0.5),
                (lambda job: steps_shown(job) >= 3, 0.6),
                (saves, 0.05),
            ]
        )
        while job.process.poll() is None and not after(job):
            time.sleep(0.002)
        end = time.monotonic() + rng.uniform(0.0, longest_s)
        while job.process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        if job.process.poll() is not None:
            assert job.process.returncode == 0, job.shown
            return kills
        saving = saves(job)
        job.send(signal.SIGKILL)
        kills.append("save" if saving else moment(job))


def moment(job):
    if steps_shown(job):
        return "step or evaluation"
    return "base's evaluation" if "compiled" in job.shown else "start"
