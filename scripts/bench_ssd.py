"""Times the scan on this CPU beside named peers: A B A B, each in its own process.

    python scripts/bench_ssd.py --python_peers=/path/to/venv/bin/python

Peers, each timed through its public function, from the raw step size on (softplus is
part of every contender), with one group of B and C and a skip weight:
  mamba2-jax    mamba2_jax.modeling.ssd_forward, jitted
  transformers  transformers.models.mamba2.modeling_mamba2.mamba2_chunk_scan, the torch
                scan of Mamba2Mixer, eager and under torch.compile
A peer that cannot be imported is named "not installed". Peak memory is the high-water
mark of warm calls less the resident memory before the first, inputs made. The rate is
the floating-point work of the chunked form (pallas_kernels/ssd/README.md) by time; its
share is of a 2048-cube float32 product in JAX on as many cores.
"""

import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from absl import app, flags

flags.DEFINE_integer("length", 4096, "tokens")
flags.DEFINE_integer("heads", 24, "heads")
flags.DEFINE_integer("headdim", 64, "channels of a head")
flags.DEFINE_integer("d_state", 128, "state size")
flags.DEFINE_integer("chunk_size", 64, "tokens per chunk, for every contender")
flags.DEFINE_integer("cores", 0, "pin every contender to so many cores; 0: all")
flags.DEFINE_integer("rounds", 2, "how often the contenders take turns")
flags.DEFINE_integer("calls", 5, "timed calls in each process; the median counts")
flags.DEFINE_list("contenders", [], "only these; empty: all")
flags.DEFINE_string("python_peers", sys.executable, "interpreter that has the peers")
flags.DEFINE_string("out", "", "also write the results to this JSON file")
flags.DEFINE_string("child", "", "internal: the contender to time in this process")
flags.DEFINE_bool("backward", False, "internal: forward and backward")
FLAGS = flags.FLAGS


def _inputs():
    """x, raw dt, A, B, C, D as float32 numpy arrays; dt is 1e-3..0.1 after softplus."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens, h, p, n = (1, FLAGS.length), FLAGS.heads, FLAGS.headdim, FLAGS.d_state
    dt = rng.uniform(1e-3, 0.1, (*tokens, h))
    arrays = (
        rng.standard_normal((*tokens, h, p)),
        np.log(np.expm1(dt)),
        -rng.uniform(1, 16, h),
        rng.standard_normal((*tokens, 1, n)),
        rng.standard_normal((*tokens, 1, n)),
        rng.standard_normal(h),
    )
    return [a.astype(np.float32) for a in arrays]


def _jax_call(scan):
    """A call of `scan`, or of it and its gradient, on device arrays."""
    import jax

    arrays = [jax.device_put(a) for a in _inputs()]
    if FLAGS.backward:
        weights = arrays[0] * 0.3
        grad = jax.jit(lambda a, w: jax.vjp(lambda *t: scan(*t), *a)[1](w))
        return lambda: jax.block_until_ready(grad(arrays, weights))
    forward = jax.jit(scan)
    return lambda: jax.block_until_ready(forward(*arrays))


def _ours():
    import jax

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pallas_kernels import ssd

    def scan(x, dt, A, B, C, D):
        return ssd(x, jax.nn.softplus(dt), A, B, C, D=D, chunk_size=FLAGS.chunk_size).y

    return _jax_call(scan)


def _mamba2_jax():
    import jax.numpy as jnp

    peer = importlib.import_module("mamba2_jax.modeling")

    def scan(x, dt, A, B, C, D):
        B, C = (jnp.repeat(t, FLAGS.heads, axis=2) for t in (B, C))
        rest = (FLAGS.chunk_size, D, jnp.zeros_like(A), 0.0, float("inf"))
        return peer.ssd_forward(x, dt, A, B, C, *rest)[0]

    return _jax_call(scan)


def _transformers(*, compiled=False):
    import torch

    if FLAGS.cores:
        torch.set_num_threads(FLAGS.cores)
    peer = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    arrays = [torch.from_numpy(a) for a in _inputs()]
    weights = arrays[0] * 0.3

    def scan(x, dt, A, B, C, D):
        options = {"chunk_size": FLAGS.chunk_size, "D": D, "dt_softplus": True}
        return peer.mamba2_chunk_scan(x, dt, A, B, C, **options)

    scan = torch.compile(scan) if compiled else scan

    def forward():
        with torch.no_grad():
            return scan(*arrays)

    def backward():
        for t in arrays:
            t.grad = None
            t.requires_grad_()
        scan(*arrays).backward(weights)

    return backward if FLAGS.backward else forward


def _matrix_product():
    import jax

    a = jax.numpy.ones((2048, 2048))
    product = jax.jit(lambda a: a @ a)
    return lambda: product(a).block_until_ready()


CONTENDERS = {
    "ours": _ours,
    "mamba2-jax": _mamba2_jax,
    "transformers": _transformers,
    "transformers compiled": lambda: _transformers(compiled=True),
}


def _memory_mib(field):
    status = Path("/proc/self/status").read_text()
    (line,) = (s for s in status.splitlines() if s.startswith(field))
    return int(line.split()[1]) / 1024


def _child():
    """Time one contender in this process and print one JSON line."""
    if FLAGS.cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: FLAGS.cores]))
    make = CONTENDERS.get(FLAGS.child, _matrix_product)
    try:
        call = make()
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    before = _memory_mib("VmRSS")
    call()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # restart the high-water mark
    seconds, cpu_seconds = [], []
    for _ in range(FLAGS.calls):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    result = {
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
        "memory_mib": _memory_mib("VmHWM") - before,
        "versions": {
            name: sys.modules[name].__version__
            for name in ("jax", "torch", "transformers")
            if name in sys.modules
        },
    }
    print(json.dumps(result))


def _run(contender, *, backward):
    """Time a contender in a fresh process; None if it is not installed."""
    mine = contender in ("ours", "matrix product")
    command = [sys.executable if mine else FLAGS.python_peers, __file__]
    names = ("length", "heads", "headdim", "d_state", "chunk_size", "cores", "calls")
    command += [f"--{name}={FLAGS[name].value}" for name in names]
    command += [f"--child={contender}", f"--backward={backward}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{contender} failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return None if "missing" in result else result


def _work(*, backward):
    """Floating-point operations of the chunked form."""
    q, p, n = FLAGS.chunk_size, FLAGS.headdim, FLAGS.d_state
    token = FLAGS.heads * (2 * q * p + 4 * p * n) + 2 * q * n
    if backward:
        token += FLAGS.heads * (4 * q * p + 8 * p * n) + 6 * q * n
    return token * FLAGS.length


def _measure():
    """Results by direction and contender: medians over the rounds."""
    names = FLAGS.contenders or list(CONTENDERS)
    found = {}
    for _ in range(FLAGS.rounds):
        for backward in (False, True):
            for name in ("matrix product", *names):
                found.setdefault((backward, name), []).append(
                    _run(name, backward=backward)
                )
    table = {}
    for (backward, name), runs in found.items():
        row = None
        if None not in runs:
            keys = ("seconds", "cpu_seconds", "memory_mib")
            row = {k: statistics.median(r[k] for r in runs) for k in keys}
            row["versions"] = runs[0]["versions"]
        table.setdefault("forward+backward" if backward else "forward", {})[name] = row
    return table


def _print_table(table):
    for direction, rows in table.items():
        rate = 2 * 2048**3 / rows.pop("matrix product")["seconds"]
        ours = rows.get("ours")
        print(f"\n{direction} (matrix product {rate / 1e9:.0f} GFLOP/s)")
        print(f"{'':24}{'ms':>8}{'CPU ms':>8}{'MiB':>7}{'of rate':>9}{'ratio':>7}")
        for name, row in rows.items():
            if row is None:
                print(f"{name:24}  not installed")
                continue
            share = _work(backward="+" in direction) / row["seconds"] / rate
            ratio = row["seconds"] / ours["seconds"] if ours else float("nan")
            print(
                f"{name:24}{row['seconds'] * 1e3:8.0f}{row['cpu_seconds'] * 1e3:8.0f}"
                f"{row['memory_mib']:7.0f}{share:9.0%}{ratio:7.2f}"
                f"  {' '.join(f'{k} {v}' for k, v in row['versions'].items())}"
            )


def main(argv):
    """Print the table, and write the JSON where asked."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if FLAGS.child:
        _child()
        return
    table = _measure()
    if FLAGS.out:
        Path(FLAGS.out).write_text(json.dumps(table, indent=1) + "\n")
    _print_table(table)


if __name__ == "__main__":
    app.run(main)
