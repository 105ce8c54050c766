"""Times every kernel beside the reference under XLA and the peers that are installed.

    python scripts/bench_kernels.py                      # on a GPU; jax, absl-py
    python scripts/bench_kernels.py --ops=ssd --out=runs/kernels.json

First a gate: outputs and gradients of the kernel against the reference in float32 from
the same bfloat16 inputs, each within 1 % of its largest value. What fails is not timed.
On Hopper the portable form of a kernel (mma) is timed beside its own one (wgmma).
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
from pallas_kernels import compat

GATE = 1e-2
LARGE_MEMORY = 40 * 2**30

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Of this command; gpu_check.py, which imports it, has others."""
    flags.DEFINE_list("ops", [], "Only these operators; empty: all.")
    flags.DEFINE_integer("max_tokens", 0, "Cases of at most so many; 0: by the memory.")
    flags.DEFINE_string("out", "", "JSON file for the rows.")


def relative_errors(got, want) -> dict[str, float]:
    """Largest error over largest value, by name; inf where something is not finite."""

    def one(g, w):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if not np.isfinite(g).all():
            return float("inf")
        return float(np.abs(g - w).max() / max(np.abs(w).max(), 1e-30))

    return {name: one(got[name], want[name]) for name in want}


@jax.jit
def _errors(got, want):
    """As `relative_errors`, on the device: some outputs are gigabytes."""

    def one(g, w):
        g, w = g.astype(jnp.float32), w.astype(jnp.float32)
        least = jnp.float32(1e-30)
        error = jnp.abs(g - w).max() / jnp.maximum(jnp.abs(w).max(), least)
        return jnp.where(jnp.isfinite(g).all(), error, jnp.inf)

    return jax.tree.map(one, got, want)


def truth(case, inputs) -> dict[str, jax.Array]:
    """The reference in float32 from the same numbers."""

    def wide(t):
        return t.astype(jnp.float32) if jnp.issubdtype(t.dtype, jnp.floating) else t

    with jax.default_matmul_precision("highest"):
        run = jax.jit(kernel_cases.with_gradients(case, "reference"))
        return run(jax.tree.map(wide, inputs))


def measure(case, *, peers: bool = True) -> list[dict]:
    """A row for each form of the kernel: the gate's errors; the times if it passed."""
    inputs = kernel_cases.cast(case, jnp.bfloat16)
    want = truth(case, inputs)
    gates = [_gate(case, form, inputs, want) for form in kernel_cases.forms(case)]
    del want
    rows = [row for row, _ in gates]
    passed = [(row, run) for row, run in gates if row["passed"]]
    if passed:
        _time(case, inputs, passed)
        if peers and case.op == "ssd":
            found = {name: _peer(make, inputs) for name, make in PEERS.items()}
            passed[0][0]["peers"] = found
    return rows


def _gate(case, form, inputs, want):
    """(row, the compiled kernel); a form that fails does not hide the other."""
    row = {"op": case.op, "case": case.name, "form": form, "times": {}}
    made = kernel_cases.with_gradients(case, "pallas")
    run = jax.jit(kernel_cases.by_form(made, form))
    try:
        found = {k: float(v) for k, v in _errors(run(inputs), want).items()}
    except Exception as error:  # told in the table
        return failed(row, error), None
    worst = max(found, key=found.get)
    row |= {"worst": worst, "error": found[worst], "passed": found[worst] <= GATE}
    return row, run


def failed(row, error) -> dict:
    """The row of what raised."""
    text = f"{type(error).__name__}: {str(error)[:300]}"
    return row | {"worst": text, "error": float("inf"), "passed": False}


def _time(case, inputs, passed):
    """Medians into the rows: of each form, of the reference; the floor.

    What the gate has compiled is the pass with gradients, or the only one there is.
    """
    kind = jax.devices()[0].device_kind
    gated = kernel_cases.with_gradients
    passes = [("forward", kernel_cases.forward if case.both else gated, case.forward)]
    if case.both:
        passes.append(("both", gated, case.both))
    for name, make, work in passes:
        theirs, _ = median_ms(jax.jit(make(case, "reference")), inputs)
        for row, run in passed:
            if make is not gated:
                made = kernel_cases.by_form(make(case, "pallas"), row["form"])
                run = jax.jit(made)
            ours, row["clock"] = median_ms(run, inputs)
            times = {"pallas": ours, "reference": theirs, "floor": floor_ms(work, kind)}
            row["times"][name] = times


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
    head = f"{row['op']} {row['case']}, {row['form']}"
    shown = [f"{head}: {verdict}, {row['worst']} {row['error']:.1e}"]
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
            found = measure(case, peers=peers)
        except Exception as error:  # the other cases are wanted all the same
            row = {"op": case.op, "case": case.name, "form": "none", "times": {}}
            found = [failed(row, error)]
        print("\n".join(line for row in found for line in lines(row)), flush=True)
        rows += found
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
        "platform": " ".join(jax.devices()[0].client.platform_version.split()),
        "command": " ".join(["python", *sys.argv]),
    }


def check_version(command: str) -> None:
    """Raise NotImplementedError where this JAX has no kernels to run."""
    if not compat.HAS_MOSAIC_GPU:
        raise NotImplementedError(
            f"{command}: got JAX {jax.__version__}; expected {compat.MOSAIC_GPU_NEEDS}"
        )


def keep(out: str, found: dict) -> None:
    """Write a JSON file, with the folders it is in; no name, no file.

    Called before anything is measured too: a name that cannot be written is told then.
    """
    if not out:
        return
    if not out.endswith(".json"):
        raise ValueError(f"--out: got {out!r}; expected a name that ends in .json")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(found, indent=1) + "\n")


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
    check_version("bench_kernels")
    head = described()
    keep(FLAGS.out, head | {"rows": []})
    print(", ".join(f"{k} {v}" for k, v in head.items()))
    rows = run(FLAGS.ops, FLAGS.max_tokens)
    keep(FLAGS.out, head | {"rows": rows})
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
