"""Check every kernel on this GPU, time them, and time whole steps; under 8 minutes.

    python scripts/gpu_check.py --out=gpu_check.json

Needs jax (0.11 or later, for CUDA), flax, optax and orbax-checkpoint; no data, nothing
is downloaded. In order:
  1. outputs and all gradients of each kernel against float64 computed on the CPU, at
     odd lengths and with documents, in bfloat16 and, where it takes it, float32; on
     Hopper both its own form (wgmma) and the portable one (mma);
  2. bench_kernels.py;
  3. training steps of four layers of student_1b4's width: dense and ternary, full and
     LoRA, with the kernels and with XLA alone; their losses must agree.
Writes the JSON, and beside it the same for reading (.md). Please send both, with the
name of your card.

--interpret runs all of it on a CPU at tiny sizes, without times: a check of the check.
Exit codes: 0 all right, 1 something is not, 2 a mistake.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import bench_kernels  # noqa: E402
import gpu_check_step  # noqa: E402
import kernel_cases  # noqa: E402

from bitmamba import command_line  # noqa: E402

# Largest error over largest value, of every output and gradient. bfloat16 operands have
# 8 bits; float32 ones are products of two bfloat16 parts each (pallas_kernels/ssd).
LIMITS = {"bfloat16": 1e-2, "float32": 2e-4}
WIDE_OPS = ("ssd", "causal_conv1d")
LOSS_LIMIT = 1e-3
# When no further case is begun; one of them may take a minute.
SECONDS = 400

flags.DEFINE_string("out", "", "JSON file for what is found; and a .md beside it.")
flags.DEFINE_bool("interpret", False, "On a CPU, tiny sizes, no times.")
FLAGS = flags.FLAGS


def check(case, dtype: str, form: str) -> dict:
    """Errors of one form of a kernel against float64, by output and gradient."""
    inputs = kernel_cases.cast(case, dtype)
    run = kernel_cases.by_form(kernel_cases.with_gradients(case, "pallas"), form)
    got = jax.jit(run)(inputs)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        # The numbers that the kernel got, which dtype has rounded.
        exact = {k: None if v is None else _as_float64(v) for k, v in inputs.items()}
        want = jax.jit(kernel_cases.with_gradients(case, "reference"))(exact)
        errors = bench_kernels.relative_errors(got, want)
    worst = max(errors, key=errors.get)
    passed = errors[worst] <= LIMITS[dtype]
    row = {"op": case.op, "case": case.name, "form": form, "dtype": dtype}
    row["passed"] = passed
    return row | {"worst": worst, "error": errors[worst], "errors": errors}


def _as_float64(t):
    host = jax.device_get(t)
    wide = jnp.issubdtype(t.dtype, jnp.floating)
    return jnp.asarray(host, jnp.float64 if wide else t.dtype)


def check_all() -> list[dict]:
    """Every kernel; one that fails does not hide the others."""
    rows = []
    for make in kernel_cases.small_cases():
        case = make()
        dtypes = LIMITS if case.op in WIDE_OPS else ["bfloat16"]
        every = [(f, d) for d in dtypes for f in kernel_cases.forms(case, d)]
        for form, dtype in every:
            try:
                row = check(case, dtype, form)
            except Exception as error:  # told in the table
                text = f"{type(error).__name__}: {str(error)[:300]}"
                row = {"op": case.op, "case": case.name, "form": form, "dtype": dtype}
                row |= {"passed": False, "worst": text, "error": float("inf")}
            verdict = "right" if row["passed"] else "WRONG"
            told = f"{row['op']} {row['case']} {form} {dtype}: {row['worst']}"
            print(f"{verdict}  {told} {row['error']:.1e}", flush=True)
            rows.append(row)
    return rows


def step_all(sizes: gpu_check_step.Sizes, steps: int) -> list[dict]:
    """Steps with kernels beside steps without; losses must agree."""
    rows = []
    for linear in ("dense", "bit"):
        for mode in ("full", "lora"):
            pair = []
            for kernels in ("reference", "pallas"):
                choice = {"linear": linear, "mode": mode, "kernels": kernels}
                pair.append(gpu_check_step.run_steps(sizes, steps=steps, **choice))
                jax.clear_caches()
            losses = zip(*(row["losses"] for row in pair), strict=True)
            apart = max(abs(a - b) / abs(a) for a, b in losses)
            for row in pair:
                row |= {"apart": apart, "passed": apart <= LOSS_LIMIT}
                print(step_line(row), flush=True)
            rows += pair
    return rows


def step_line(row: dict) -> str:
    """One step for a reader."""
    return (
        f"{row['linear']:6}{row['mode']:5}{row['kernels']:10}{row['ms']:9.1f} ms "
        f"{row['tokens_per_s']:9.0f} tokens/s  peak {row['peak_gib']:.2f} GiB  losses "
        f"apart by {row['apart']:.1e} of themselves"
        f"{'' if row['passed'] else '  TOO FAR'}"
    )


def main() -> int:
    """Run the three parts and write what they found."""
    wanted = "cpu" if FLAGS.interpret else "gpu"
    if jax.default_backend() != wanted:
        raise ValueError(
            f"gpu_check: got platform {jax.default_backend()}; expected {wanted}; "
            "install jax for CUDA, or pass --interpret on a CPU"
        )
    bench_kernels.check_version("gpu_check")
    start = time.monotonic()
    found = {"head": bench_kernels.described(), "checks": [], "bench": [], "steps": []}
    keep(found)
    found["checks"] = check_all()
    keep(found)
    if FLAGS.interpret:
        found["steps"] = step_all(gpu_check_step.SMALL, steps=2)
    else:
        found["steps"] = step_all(gpu_check_step.Sizes(), steps=gpu_check_step.STEPS)
        keep(found)
        found["bench"] = bench_kernels.run(
            until=lambda: time.monotonic() - start > SECONDS
        )
    keep(found)
    rows = found["checks"] + found["bench"] + found["steps"]
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} passed")
    if FLAGS.out:
        print(f"wrote {FLAGS.out} and {Path(FLAGS.out).with_suffix('.md')}")
    return 1 if failed else 0


def keep(found: dict) -> None:
    """Write what there is so far: a kernel that hangs does not take the rest along."""
    bench_kernels.keep(FLAGS.out, found)
    if FLAGS.out:
        Path(FLAGS.out).with_suffix(".md").write_text(readable(found))


def readable(found: dict) -> str:
    """The findings as Markdown."""
    head = "\n".join(f"- {name}: {value}" for name, value in found["head"].items())
    checks = "\n".join(
        f"| {r['op']} {r['case']}, {r['form']} | {r['dtype']} | {r['worst']} | "
        f"{r['error']:.1e} | {'right' if r['passed'] else 'WRONG'} |"
        for r in found["checks"]
    )
    times = "\n".join(line for r in found["bench"] for line in bench_kernels.lines(r))
    steps = "\n".join(map(step_line, found["steps"]))
    return (
        f"{head}\n\n| kernel | dtype | worst | error | |\n|---|---|---|---|---|\n"
        f"{checks}\n\n```\n{times}\n```\n\n```\n{steps}\n```\n"
    )


if __name__ == "__main__":
    command_line.run(main)
