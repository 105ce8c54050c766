"""Times every kernel beside the reference under XLA and the peers that are installed.

    python scripts/bench_kernels.py                      # on a GPU; needs jax alone
    python scripts/bench_kernels.py --ops=ssd --out=runs/kernels.json

First a gate: outputs and gradients of the kernel against the reference in float32 from
the same bfloat16 inputs, each within 1 % of its largest value. What fails is not timed.
Then medians, in milliseconds: forward, and forward with backward; the share of the
floor (the longer of arithmetic at the device's rate and traffic at its bandwidth);
and the ratio to the reference, above 1 where the kernel is faster.

Exit codes: 0 all gates passed, 1 one did not, 2 a mistake.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
from absl import flags
from bench_kernels_peers import PEERS
from kernel_timing import floor_ms, median_ms

from bitmamba import command_line

GATE = 1e-2
LARGE_MEMORY = 40 * 2**30

flags.DEFINE_list("ops", [], "Only these operators; empty: all.")
flags.DEFINE_integer("max_tokens", 0, "Cases of at most so many; 0: by the memory.")
flags.DEFINE_string("out", "", "JSON file for the rows.")
FLAGS = flags.FLAGS


def relative_errors(got, want) -> dict[str, float]:
    """Largest error over largest value, by name; inf where something is not finite."""

    def one(g, w):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if not np.isfinite(g).all():
            return float("inf")
        return float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-30))

    return {name: one(got[name], want[name]) for name in want}


def gate(case, inputs) -> dict[str, float]:
    """Errors of the kernel beside the reference in float32 from the same numbers."""

    def wide(t):
        return t.astype(jnp.float32) if jnp.issubdtype(t.dtype, jnp.floating) else t

    run = jax.jit(kernel_cases.with_gradients(case, "pallas"))
    got = run(inputs)
    with jax.default_matmul_precision("highest"):
        truth = jax.jit(kernel_cases.with_gradients(case, "reference"))
        want = truth(jax.tree.map(wide, inputs))
    return relative_errors(got, want)


def measure(case, *, peers: bool = True) -> dict:
    """One row: the gate's errors, and the times if it passed."""
    inputs = kernel_cases.cast(case, jnp.bfloat16)
    errors = gate(case, inputs)
    worst = max(errors, key=errors.get)
    row = {
        "op": case.op,
        "case": case.name,
        "worst": worst,
        "error": errors[worst],
        "passed": errors[worst] <= GATE,
        "times": {},
    }
    if not row["passed"]:
        return row
    kind = jax.devices()[0].device_kind
    passes = {"forward": (kernel_cases.forward, case.forward)}
    if case.both:
        passes["both"] = (kernel_cases.with_gradients, case.both)
    for name, (make, work) in passes.items():
        times = {}
        for implementation in ("pallas", "reference"):
            run = jax.jit(make(case, implementation))
            times[implementation], row["clock"] = median_ms(run, inputs)
        row["times"][name] = times | {"floor": floor_ms(work, kind)}
    if peers and case.op == "ssd":
        row["peers"] = {name: _peer(make, inputs) for name, make in PEERS.items()}
    return row


def _peer(make, inputs) -> dict:
    """Times of a peer by pass, or why there are none."""
    try:
        forward, both = make(inputs)
        return {"forward": forward(), "both": both()}
    except ImportError:
        return {"missing": "not installed"}
    except Exception as error:  # a peer's trouble does not end the measurement
        return {"missing": f"{type(error).__name__}: {str(error)[:200]}"}


def lines(row) -> list[str]:
    """The row for a reader."""
    verdict = "gate passed" if row["passed"] else "GATE FAILED, not timed"
    head = f"{row['op']} {row['case']}: {verdict}, {row['worst']} {row['error']:.1e}"
    shown = [head]
    for name, times in row["times"].items():
        ours, theirs, floor = (times[k] for k in ("pallas", "reference", "floor"))
        share = f"{floor / ours:5.0%} of the floor" if floor else "floor not known"
        shown.append(
            f"    {name:8}{ours:10.3f} ms  {share}  XLA {theirs:10.3f} ms  "
            f"{theirs / ours:6.2f} x"
        )
    for peer, times in row.get("peers", {}).items():
        if "missing" in times:
            shown.append(f"    {peer}: {times['missing']}")
            continue
        ours = {name: row["times"][name]["pallas"] for name in ("forward", "both")}
        told = [f"{n} {times[n]:.3f} ms {times[n] / ours[n]:.2f} x" for n in ours]
        shown.append(f"    {peer}: {', '.join(told)}")
    return shown


def run(ops=(), max_tokens=0, *, peers=True, until=None) -> list[dict]:
    """Measure and print all cases; `until()` says when to stop."""
    limit = max_tokens or _tokens_that_fit()
    rows = []
    for make in kernel_cases.timed_cases(limit):
        if until and until():
            print("out of time: the cases that are left were not measured")
            break
        case = make()
        if ops and case.op not in ops:
            continue
        try:
            rows.append(measure(case, peers=peers))
        except Exception as error:  # the other cases are wanted all the same
            text = f"{type(error).__name__}: {str(error)[:300]}"
            row = {"op": case.op, "case": case.name, "worst": text, "times": {}}
            rows.append(row | {"error": float("inf"), "passed": False})
        print("\n".join(lines(rows[-1])), flush=True)
        jax.clear_caches()
    return rows


def _tokens_that_fit() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return 2**17 if stats.get("bytes_limit", 0) > LARGE_MEMORY else 2**14


def described() -> dict[str, str]:
    """Device and versions, for the table's head."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> int:
    """Print and keep the table."""
    known = {make().op for make in kernel_cases.small_cases()}
    if set(FLAGS.ops) - known:
        raise ValueError(
            f"--ops: got {', '.join(FLAGS.ops)}; expected some of "
            f"{', '.join(sorted(known))}"
        )
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"bench_kernels: got platform {jax.default_backend()}; expected gpu: "
            "elsewhere kernels are interpreted, and their times say nothing"
        )
    head = described()
    print(", ".join(f"{k} {v}" for k, v in head.items()))
    rows = run(FLAGS.ops, FLAGS.max_tokens)
    if FLAGS.out:
        Path(FLAGS.out).write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    command_line.run(main)
