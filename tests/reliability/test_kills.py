"""Killed at any moment, a run ends on the bits of the unbroken one.

The quick half is in tests/train/test_main_job.py: told to stop, then killed in a save.
"""

import random
import signal
import time

import pytest

STEPS = 24
RUN = {"train__steps": STEPS, "checkpoint__every": 3, "eval__every": 4}
pytestmark = pytest.mark.xdist_group("kills")


@pytest.fixture(scope="module")
def unbroken(jobs, tmp_path_factory):
    """The work directory of a run that nothing happened to."""
    workdir = tmp_path_factory.mktemp("kills") / "unbroken"
    job = jobs.start(workdir, **RUN)
    assert job.end() == 0, job.shown
    return workdir


def random_kills(jobs, workdir, config, rng, *, settings):
    """Kill a run at random moments until one lives to its end; when they came.

    A moment is a random while after something that can be seen, so that it does not
    depend on the speed of the machine: all phases are met.
    """
    moments = []
    while True:
        compiling = {"SLOW_TRAIN_COMPILES": "always"}
        job = jobs.start(workdir, config, environment=compiling, **settings)
        done = len(jobs.rows(workdir))
        after, longest_s = rng.choice(
            [
                (lambda job: True, 1.5),
                (jobs.compiles, 2.0),
                (lambda job, n=done: len(jobs.rows(job.workdir)) > n, 0.6),
                (lambda job, n=done: len(jobs.rows(job.workdir)) > n + 4, 0.3),
                (lambda job: "first step done" in job.shown and jobs.saves(job), 0.02),
            ]
        )
        delay = rng.uniform(0.0, longest_s)
        if not waited(job, after, delay):
            assert job.process.returncode == 0, job.shown
            return moments
        saving = jobs.saves(job)
        job.send(signal.SIGKILL)
        moments.append(moment(jobs, job, saving))


def waited(job, condition, delay):
    """Whether the job still lives `delay` seconds after the condition came true."""
    while job.process.poll() is None and not condition(job):
        time.sleep(0.002)
    end = time.monotonic() + delay
    while job.process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    return job.process.poll() is None


def moment(jobs, job, saving):
    if saving and "first step done" in job.shown:
        return "save"
    if "step compiled" not in job.shown:
        return "compile" if jobs.compiles(job) else "start"
    found = jobs.rows(job.workdir)
    if not found:
        return "evaluation"
    is_due = found[-1]["step"] % RUN["eval__every"] == 0
    return "evaluation" if is_due and "eval/loss" not in found[-1] else "step"


@pytest.mark.slow
def test_twenty_four_random_kills(jobs, unbroken, tmp_path):
    rng, moments = random.Random(0), []
    runs = 0
    while len(moments) < 24:
        runs += 1
        workdir = tmp_path / f"run{runs}"
        moments += random_kills(jobs, workdir, "sft", rng, settings=RUN)
        print(f"run {runs}: {len(moments)} kills so far", flush=True)
        assert jobs.final(workdir, STEPS) == jobs.final(unbroken, STEPS)
    counts = {kind: moments.count(kind) for kind in sorted(set(moments))}
    print(f"{len(moments)} kills in {runs} runs: {counts}")


@pytest.mark.slow
def test_kills_of_adapters_and_of_phase_two(jobs, tmp_path):
    """LoRA with dropout (its draws depend on the step), and phase 1 before phase 2."""
    rng = random.Random(1)
    for kind in ("lora", "phase 2"):
        ends = []
        for name in ("whole", "killed"):
            base = tmp_path / kind / name / "base"
            first = {**RUN, "train__steps": 6}
            if name == "killed" and kind == "phase 2":
                random_kills(jobs, base, "warmup", rng, settings=first)
            else:
                assert jobs.start(base, "warmup", **first).end() == 0
            config = "lora" if kind == "lora" else "sft"
            # The base's path is in the checkpoint: the same place for both.
            place = tmp_path / kind / "base"
            if place.is_symlink():
                place.unlink()
            place.symlink_to(base)
            settings = {**RUN, "checkpoint__init_from": place}
            if kind == "lora":
                settings |= {"lora__dropout": 0.1, "lora__rank": 2}
            workdir = tmp_path / kind / name / "run"
            if name == "killed":
                moments = []
                while len(moments) < 3:
                    workdir = workdir.with_name(f"run{len(moments)}")
                    moments += random_kills(
                        jobs, workdir, config, rng, settings=settings
                    )
                print(f"{kind}: {len(moments)} kills: {moments}")
            else:
                job = jobs.start(workdir, config, **settings)
                assert job.end() == 0, job.shown
            ends.append(jobs.final(workdir, STEPS))
        assert ends[0] == ends[1]
