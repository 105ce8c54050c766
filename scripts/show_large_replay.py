"""Train on gigabytes of generated text, and show that memory stays small.

    python scripts/show_large_replay.py --gigabytes=2 --out=/tmp/large

Writes ArrayRecord shards of words in a random order (from a seed, so the same again),
then runs train.py on them twice, each in a process of its own: the first tokenises all,
the second finds the cache. Shows the largest resident memory of each phase: reading and
tokenising, making the plan, and all of it with JAX, the step and its compilation; and
those of the same run on the bundled text, for what the model itself takes. Last, the
plan of a whole epoch and 5000 of its batches, without a model.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from absl import flags

from bitmamba import command_line
from bitmamba.assets_path import resolve

_GIGABYTES = flags.DEFINE_float("gigabytes", 2.0, "Of text, in 10^9 bytes.", 0.001)
_SHARDS = flags.DEFINE_integer("shards", 8, "Files.", 1)
_OUT = flags.DEFINE_string("out", "runs/large_replay", "Folder for all of it.")
_STEPS = flags.DEFINE_integer("steps", 20, "Of training.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the text.")

_BATCHES = 5000
ROOT = Path(__file__).resolve().parents[1]
# Each tells its own peak after each phase (kilobytes, by Linux).
_PEAK = """
import sys
sys.path.insert(0, {root!r})

def peak(phase):
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    print("peak", phase, lines["VmHWM"].split()[0], flush=True)
"""
# train.py as it is.
_TRAIN = """
from bitmamba.train import start

def telling(module, name, phase):
    act = getattr(module, name)
    def told(*args, **settings):
        made = act(*args, **settings)
        peak(phase)
        return made
    setattr(module, name, told)

from bitmamba.data import build
telling(build, "read_corpus", "tokens")
telling(build, "make_plan", "plan")
telling(start, "read_data", "data")

import train
from bitmamba import command_line

def main():
    then = train.main()
    peak("compiled")
    def last():
        code = then()
        peak("trained")
        return code
    return last

command_line.run(main)
"""
# A plan of the whole corpus, and many of its windows, without a model.
_EPOCH = """
import json
from bitmamba.config_read import from_config_dict
from bitmamba.train import start

plain = json.load(open(sys.argv[1]))
data = start.read_data(from_config_dict(plain))
replay = data.stores["replay"]
steps = replay.n_tokens // (data.window * data.batch_size)
plain["train"]["steps"] = steps
data = start.read_data(from_config_dict(plain))
print(f"plan of {{data.plan.n_windows:,}} windows; {{len(replay.lengths):,}} documents")
peak("plan")
for _ in zip(range({batches}), data.batches(steps // 2)):
    pass
peak("served")
"""


def main() -> None:
    out = Path(_OUT.value).absolute()
    corpus = out / "corpus"
    size = write_corpus(corpus)
    print(f"{size / 1e9:.2f} GB of text in {_SHARDS.value} shards", flush=True)
    pattern = f"--config.data.replay={corpus}/*.array_record"
    _report("bundled text", [], out / "bundled")
    _report("bundled text, compiled before", [], out / "bundled_again")
    _report("tokenised", [pattern], out / "first")
    _report("from the cache", [pattern], out / "second")
    code = (_PEAK + _EPOCH).format(root=str(ROOT), batches=_BATCHES)
    _run(
        f"an epoch planned, {_BATCHES:,} batches of it read",
        [sys.executable, "-c", code, str(out / "second" / "config.json")],
    )


def write_corpus(folder: Path) -> int:
    """Shards of texts of 50 to 1200 words; how many bytes of text."""
    from array_record.python.array_record_module import ArrayRecordWriter

    with resolve("assets:data/replay.jsonl").open(encoding="utf-8") as file:
        words = " ".join(json.loads(line)["text"] for line in file).split()
    folder.mkdir(parents=True, exist_ok=True)
    each, total = int(_GIGABYTES.value * 1e9 / _SHARDS.value), 0
    for shard in range(_SHARDS.value):
        path = folder / f"text-{shard:05d}.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:64")
        rng = np.random.default_rng([_SEED.value, shard])
        left = each
        while left > 0:
            chosen = rng.integers(0, len(words), rng.integers(50, 1200))
            text = " ".join([words[i] for i in chosen]).encode()
            writer.write(text)
            left -= len(text)
            total += len(text)
        writer.close()
    return total


def _report(title: str, settings: list[str], workdir: Path) -> None:
    command = [
        sys.executable,
        "-c",
        _PEAK.format(root=str(ROOT)) + _TRAIN,
        "--config=configs/warmup.py",
        f"--config.workdir={workdir}",
        f"--config.train.steps={_STEPS.value}",
        # The model's own memory should not hide that of the data.
        "--config.data.window=256",
        "--config.train.batch_size=2",
        "--config.eval.prompts=()",
        *settings,
    ]
    _run(title, command)


def _run(title: str, command: list[str]) -> None:
    before = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as child:
        shown = []
        for line in child.stdout:
            shown.append(line)
            if line.startswith(("tok", "peak", "plan of")):
                print(f"  {line}", end="", flush=True)
    if child.returncode:
        raise ValueError(f"{title}: ended with code {child.returncode}")
    found = dict(re.findall(r"^peak (\w+) (\d+)$", "".join(shown), re.MULTILINE))
    phases = ", ".join(f"{k} {int(v) // 1024} MiB" for k, v in found.items())
    took = time.monotonic() - before
    print(f"{title}: peak resident memory after {phases}; {took:.0f} s", flush=True)


if __name__ == "__main__":
    command_line.run(main)
