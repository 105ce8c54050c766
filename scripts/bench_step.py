"""Times a whole training step on this CPU beside named peers, each in its own process.

    python scripts/bench_step.py --python_peers=/path/to/venv/bin/python

A step is forward, backward and AdamW, in float32, of one Mamba-2 language model with
the same shape and the same number of parameters everywhere. Ours is the step of
`train.py`: documents isolated, gradients checked and clipped, the optimiser's report.
Peers, each through its public model, loss and optimiser:
  mamba2-jax    mamba2_jax.Mamba2ForCausalLM and its loss, flax nnx, optax.adamw, jitted
  transformers  transformers.Mamba2ForCausalLM and its loss, torch.optim.AdamW (fused),
                eager and under torch.compile
A peer that cannot be imported is named "not installed". Contenders take turns, A B A B;
medians count. Peak memory is the high-water mark of warm steps less the resident memory
after the imports. The rate is 6 operations a token for each parameter that is
multiplied, and the chunked scan's (pallas_kernels/ssd/README.md), by time; its share is
of a 2048-cube float32 product in JAX. With --out, runs are added to those in the file,
so that a long measurement may be made in pieces.
"""

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from absl import app, flags
from bench_step_contenders import CONTENDERS, EXPAND, PRODUCT

SHAPE = {
    "d_model": (512, "residual width"),
    "layers": (8, "blocks"),
    "headdim": (64, "channels of a head"),
    "d_state": (128, "state size"),
    "vocab_size": (4096, "vocabulary; the head is not tied to the embedding"),
    "length": (1024, "tokens a row"),
    "batch": (1, "rows"),
    "chunk_size": (64, "tokens per chunk of our scan"),
    "peer_chunk_size": (64, "tokens per chunk of the peers' scans"),
    "steps": (5, "timed steps in each process; the median counts"),
}
for _name, (_default, _help) in SHAPE.items():
    flags.DEFINE_integer(_name, _default, _help)
flags.DEFINE_integer("rounds", 2, "how often the contenders take turns")
flags.DEFINE_list("contenders", [], "only these; empty: all")
flags.DEFINE_string("python_peers", sys.executable, "interpreter that has the peers")
flags.DEFINE_string("out", "", "JSON file that keeps the runs")
flags.DEFINE_string("child", "", "internal: the contender to time in this process")
FLAGS = flags.FLAGS


def _memory_mib(field):
    status = Path("/proc/self/status").read_text()
    (line,) = (s for s in status.splitlines() if s.startswith(field))
    return int(line.split()[1]) / 1024


def _child():
    """Time one contender in this process and print one JSON line."""
    try:
        make = CONTENDERS[FLAGS.child](FLAGS)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    before = _memory_mib("VmRSS")
    call, n_params = make()
    losses = [call(), call()]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what making and compiling have freed
    Path("/proc/self/clear_refs").write_text("5")  # restart the high-water mark
    seconds = []
    for _ in range(FLAGS.steps):
        start = time.perf_counter()
        losses.append(call())
        seconds.append(time.perf_counter() - start)
    names = ("jax", "mamba2_jax", "torch", "transformers")
    found = {n: sys.modules[n].__version__ for n in names if n in sys.modules}
    result = {
        "seconds": statistics.median(seconds),
        "memory_mib": _memory_mib("VmHWM") - before,
        "n_params": n_params,
        "losses": losses,
        "versions": found,
    }
    print(json.dumps(result))


def _run(contender):
    """Time a contender in a fresh process: a row of results."""
    mine = contender in ("ours", PRODUCT)
    command = [sys.executable if mine else FLAGS.python_peers, __file__]
    command += [f"--{name}={FLAGS[name].value}" for name in SHAPE]
    command += [f"--child={contender}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{contender} failed:\n{done.stderr[-2000:]}")
    return {"contender": contender} | json.loads(done.stdout.splitlines()[-1])


def _work(n_params):
    """Floating-point operations of a step: products with parameters, and the scan."""
    q, p, n = FLAGS.chunk_size, FLAGS.headdim, FLAGS.d_state
    heads = EXPAND * FLAGS.d_model // p
    scan = 3 * heads * (2 * q * p + 4 * p * n) + 8 * q * n
    multiplied = n_params - FLAGS.vocab_size * FLAGS.d_model  # the embedding is not
    return FLAGS.batch * FLAGS.length * (6 * multiplied + FLAGS.layers * scan)


def _measure():
    """All runs: those of the file, and the new ones."""
    settings = {name: FLAGS[name].value for name in SHAPE}
    out = Path(FLAGS.out) if FLAGS.out else None
    kept = {"settings": settings, "runs": []}
    if out and out.exists():
        kept = json.loads(out.read_text())
        if kept["settings"] != settings:
            raise app.UsageError(
                f"--out={out}: got runs of {kept['settings']}; expected {settings}; "
                "name another file"
            )
    for _ in range(FLAGS.rounds):
        for name in FLAGS.contenders or CONTENDERS:
            kept["runs"].append(_run(name))
            if out:
                out.write_text(json.dumps(kept, indent=1) + "\n")
    return kept["runs"]


def _print_table(runs):
    rows = {}
    for run in runs:
        rows.setdefault(run["contender"], []).append(run)
    missing = [name for name, found in rows.items() if "missing" in found[-1]]
    rows = {
        name: {
            key: statistics.median(run[key] for run in found)
            for key in ("seconds", "memory_mib", "n_params")
        }
        | {"versions": found[-1]["versions"], "n_runs": len(found)}
        for name, found in rows.items()
        if name not in missing
    }
    product, ours = rows.pop(PRODUCT, None), rows.get("ours")
    rate = 2 * 2048**3 / product["seconds"] if product else float("nan")
    print(f"matrix product {rate / 1e9:.0f} GFLOP/s; time and MiB relative to ours")
    heads = ("ms", "tokens/s", "MiB", "of rate", "time", "MiB")
    print(
        f"{'':24}" + "".join(f"{h:>9}" for h in heads) + "  parameters, runs, versions"
    )
    for name, row in rows.items():
        share = _work(row["n_params"]) / row["seconds"] / rate
        time_ratio, memory_ratio = (
            row[key] / ours[key] if ours else float("nan")
            for key in ("seconds", "memory_mib")
        )
        versions = " ".join(f"{k} {v}" for k, v in row["versions"].items())
        print(
            f"{name:24}{row['seconds'] * 1e3:9.0f}"
            f"{FLAGS.batch * FLAGS.length / row['seconds']:9.0f}"
            f"{row['memory_mib']:9.0f}{share:9.0%}{time_ratio:9.2f}{memory_ratio:9.2f}"
            f"  {row['n_params']:.0f}, {row['n_runs']}, {versions}"
        )
    for name in missing:
        print(f"{name:24}  not installed")


def main(argv):
    """Print the table, and keep the runs where asked."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = set(FLAGS.contenders) - set(CONTENDERS)
    if unknown:
        raise app.UsageError(
            f"--contenders: got {unknown}; expected {list(CONTENDERS)}"
        )
    if FLAGS.child:
        _child()
    else:
        _print_table(_measure())


if __name__ == "__main__":
    app.run(main)
