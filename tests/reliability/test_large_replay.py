"""Runs on large text: killed, their tokens lost or damaged, in two processes.

All end on the bits of the unbroken run.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 8
RUN = {
    "train__steps": STEPS,
    "checkpoint__every": 3,
    "eval__every": 4,
    "model__layers": "-",
    "model__vocab_size": 304,
    "data__window": 64,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The pattern of three shards of rows."""
    folder = tmp_path_factory.mktemp("corpus")
    for shard in range(3):
        with (folder / f"{shard}.jsonl").open("w") as file:
            for i in range(30):
                text = f"Line {i} of shard {shard}. " * (1 + i % 5)
                file.write(json.dumps({"text": text}) + "\n")
    return f"{folder}/*.jsonl"


@pytest.fixture
def start(jobs, corpus, tmp_path):
    def start(name="run", **settings):
        run = {"data__replay": corpus, **RUN, **settings}
        return jobs.start(tmp_path / name, "warmup", **run)

    return start


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_killed_run_goes_on_though_its_tokens_are_lost_or_damaged(
    start, jobs, tmp_path
):
    unbroken = start("unbroken", wait_s=0)
    assert unbroken.end() == 0, unbroken.shown
    assert "tokens of 3 shards: 0 from the cache, 3 to make" in unbroken.shown

    killed = start(wait_s=0.3)
    killed.wait_for(jobs.is_at(4))
    killed.send(signal.SIGKILL)
    assert "tokens of 3 shards: 3 from the cache" in killed.shown
    lost, damaged, _ = sorted((tmp_path / "tokens").glob("*/*.tokens"))
    lost.unlink()
    flip(damaged, -100)
    again = start(wait_s=0)

    assert again.end() == 0, again.shown
    assert "1 from the cache, 2 to make" in again.shown
    assert "made anew" in again.shown
    assert jobs.final(tmp_path / "run", STEPS) == jobs.final(
        tmp_path / "unbroken", STEPS
    )


@pytest.mark.slow
def test_damage_met_in_training_ends_the_run_in_a_line(start, jobs, tmp_path):
    unbroken = start("unbroken", wait_s=0)
    assert unbroken.end() == 0, unbroken.shown
    for path in (tmp_path / "tokens").glob("*/*.tokens"):
        flip(path, 50)

    damaged = start(wait_s=0)

    assert damaged.end() == 1, damaged.shown
    (line,) = [x for x in damaged.shown.splitlines() if "error:" in x]
    assert "data.token_cache" in line
    assert "start again" in line
    assert "Traceback" not in damaged.shown
    again = start(wait_s=0)
    while again.end() == 1:  # each start finds one file, and removes it
        again = start(wait_s=0)
    assert again.end() == 0, again.shown
    assert jobs.final(tmp_path / "run", STEPS) == jobs.final(
        tmp_path / "unbroken", STEPS
    )


@pytest.mark.slow
def test_a_changed_shard_is_not_resumed(start, jobs, corpus, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(corpus.rpartition("/")[0], folder)
    pattern = f"{folder}/*.jsonl"
    first = start(data__replay=pattern, wait_s=0, train__steps=STEPS)
    assert first.end() == 0, first.shown
    (folder / "1.jsonl").write_text('{"text": "another text"}\n')

    second = start(data__replay=pattern, wait_s=0)

    assert second.end() == 2, second.shown
    assert "1.jsonl: changed; its tokens are made anew" in second.shown
    (line,) = [x for x in second.shown.splitlines() if "error:" in x]
    assert f"file {pattern}" in line


@pytest.mark.slow
def test_two_processes_tokenise_their_shares_and_train_as_one(start, jobs, tmp_path):
    def together(name, count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={4 // count}"
        run = [
            start(
                name,
                wait_s=0,
                label=f".{index}",
                environment={
                    "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0"
                },
                mesh__data=4,
                train__batch_size=4,
                data__token_cache=tmp_path / f"tokens_of_{count}",
                distributed__coordinator=f"127.0.0.1:{port}",
                distributed__processes=count,
                distributed__process_id=index,
            )
            for index in range(count)
        ]
        codes = [process.end() for process in run]
        assert codes == [0] * count, [process.shown for process in run]
        return run

    first, second = together("two", 2)
    together("one", 1)

    assert "3 to make by 2 processes" in first.shown
    assert "no progress" not in first.shown
    assert "tokens of" not in second.shown
    assert jobs.final(tmp_path / "two", STEPS) == jobs.final(tmp_path / "one", STEPS)


@pytest.mark.slow
def test_memory_stays_small_while_tokenising(tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "scripts/show_large_replay.py",
            "--gigabytes=0.03",
            "--shards=2",
            "--steps=2",
            f"--out={tmp_path}",
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    peaks = [int(mib) for mib in re.findall(r"data (\d+) MiB", done.stdout)]
    assert len(peaks) == 4
    assert max(peaks) < 300, done.stdout
