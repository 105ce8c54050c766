"""Times a sweep of K arms beside K separate runs of train.py; wall time, all included.

    python scripts/bench_sweep.py --lr=1e-3,3e-3,1e-2,3e-2 --steps=40

Each run is a process of its own with an empty compilation cache of its own, and makes
the same updates on the same data with the same evaluations as its arm; both sides draw
no samples. Each saves at its end. Runs
follow one another: nothing else should use the machine. Losses after the last step are
compared to the bit. With --out, the figures are written as JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--config.eval.prompts=()", "--config.data.window=128")
flags.DEFINE_string("config_file", "configs/lora.py", "a file of configs/")
flags.DEFINE_list("lr", ["1e-3", "3e-3", "1e-2", "3e-2"], "one arm each")
flags.DEFINE_integer("steps", 40, "updates of each arm")
flags.DEFINE_string("arms", "auto", "as in scripts/sweep.py")
flags.DEFINE_string("out", "", "JSON file for the figures")
FLAGS = flags.FLAGS


def _timed(folder, script, *arguments):
    """Seconds of a script in a process that finds nothing compiled."""
    settings = [
        f"--config={FLAGS.config_file}",
        f"--config.workdir={folder}",
        f"--config.train.steps={FLAGS.steps}",
        f"--config.eval.every={FLAGS.steps}",
        f"--config.checkpoint.every={FLAGS.steps}",
        *SMALL,
    ]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "xla")}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, script, *settings, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{script} failed:\n{done.stdout}\n{done.stderr}"[-3000:])
    return seconds


def _last_loss(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["eval/loss"] for row in rows if "eval/loss" in row][-1]


def main(argv):
    """Print both times, their ratio, and whether the losses agree."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    lrs = FLAGS.lr
    with tempfile.TemporaryDirectory(prefix="bench-sweep-") as top:
        together = Path(top) / "sweep"
        seconds = _timed(
            together,
            "scripts/sweep.py",
            f"--lr={','.join(lrs)}",
            f"--arms={FLAGS.arms}",
            "--factor=1e30",  # a separate run never stops an arm that diverges
        )
        print(f"sweep of {len(lrs)} arms: {seconds:.1f} s", flush=True)
        found = json.loads((together / "sweep" / "sweep.json").read_text())
        swept = [arm["evaluations"][-1]["eval/loss"] for arm in found["arms"]]
        alone, losses = [], []
        for lr in lrs:
            folder = Path(top) / lr
            alone.append(_timed(folder, "train.py", f"--config.optim.lr={lr}"))
            losses.append(_last_loss(folder / "metrics.jsonl"))
            print(f"lr {lr} alone: {alone[-1]:.1f} s", flush=True)
    result = {
        "steps": FLAGS.steps,
        "lr": lrs,
        "arms": found["ranks"][0]["arms"],
        "sweep_s": seconds,
        "separate_s": alone,
        "ratio": sum(alone) / seconds,
        "same_losses": swept == losses,
    }
    print(
        f"{len(lrs)} separate runs: {sum(alone):.1f} s, "
        f"{result['ratio']:.2f} x the sweep's time; last losses "
        f"{'equal to the bit' if result['same_losses'] else f'{swept}, {losses}'}"
    )
    if FLAGS.out:
        Path(FLAGS.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
