"""Compile every kernel for GPUs that are not here and hold it to the committed table.

    python scripts/gpu_compile_check.py                     # all targets, all kernels
    python scripts/gpu_compile_check.py --targets=rtx3060 --ops=out_prod
    python scripts/gpu_compile_check.py --update            # rewrite the table

Needs no GPU, no driver and no CUDA toolkit: JAX 0.11 or later and the extra `gpucheck`
(pip install -e ".[gpucheck]"). For each kernel case of each pallas_kernels/*/shapes.py
and each GPU in scripts/gpu_targets/: registers, spilled bytes, shared memory, and the
instructions that matter. The table is scripts/gpu_targets/table.json, for reading
scripts/gpu_targets/README.md.

Exit codes: 0 as in the table; 1 a kernel does not compile, spills, needs more shared
memory than the GPU has, or differs from the table; 2 a mistake, or no extra installed.
"""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from absl import flags

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bitmamba import command_line  # noqa: E402

TARGETS = ROOT / "scripts" / "gpu_targets"
TABLE = TARGETS / "table.json"
READABLE = TARGETS / "README.md"
INSTRUCTIONS = {
    "mma": r"mma\.sync",
    "wgmma": r"wgmma\.mma_async",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp_async": r"cp\.async\.c[ag]",
}
FIELDS = ("registers", "spilled_bytes", "shared_bytes", *INSTRUCTIONS)

_TARGETS = flags.DEFINE_list("targets", [], "Only these GPUs; empty: all.")
_OPS = flags.DEFINE_list("ops", [], "Only these operators; empty: all.")
_UPDATE = flags.DEFINE_bool("update", False, "Rewrite the table with what is found.")
_CHILD = flags.DEFINE_string("child", "", "Internal: the GPU of this process.")


def known_targets() -> list[str]:
    """The GPUs there is a description of."""
    return sorted(path.stem for path in TARGETS.glob("*.txtpb"))


def known_ops() -> list[str]:
    """The operators that list kernel cases."""
    files = sorted((ROOT / "pallas_kernels").glob("*/shapes.py"))
    return [f.parent.name for f in files if "def kernel_cases" in f.read_text("utf-8")]


def chosen(flag: flags.FlagHolder, known: list[str]) -> list[str]:
    """The flag's names, checked; all known ones when it is empty."""
    unknown = [name for name in flag.value if name not in known]
    if unknown:
        raise ValueError(
            f"--{flag.name}: got {', '.join(unknown)}; expected some of "
            f"{', '.join(known)}"
        )
    return flag.value or known


def measure(dump: Path) -> dict[str, int]:
    """What the assembler and Mosaic wrote about the kernels just compiled.

    The largest number of registers and shared bytes, the sum of everything else.
    """
    logs = [path.read_text() for path in dump.glob("*.ptxas")]
    plans = [path.read_text() for path in dump.glob("*.resources.txt")]
    code = "".join(path.read_text() for path in dump.glob("*.ptx"))
    if not logs or len(logs) != len(plans):
        raise RuntimeError(
            f"{len(logs)} assembler logs and {len(plans)} plans; expected as many"
        )
    found = {
        "registers": max(int(re.search(r"Used (\d+) registers", s)[1]) for s in logs),
        "spilled_bytes": sum(
            int(re.search(r"(\d+) bytes spill stores", s)[1]) for s in logs
        ),
        "shared_bytes": max(
            int(re.search(r"smem_scratch_bytes=(\d+)", s)[1]) for s in plans
        ),
    }
    counts = {name: len(re.findall(text, code)) for name, text in INSTRUCTIONS.items()}
    return found | counts


def compile_cases(target: str, ops: list[str]) -> None:
    """In a process of its own: a line of JSON for each kernel case."""
    import jax

    from pallas_kernels.absent_gpu import absent_gpu, compile_for

    gpu = absent_gpu((TARGETS / f"{target}.txtpb").read_text())
    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    for op in ops:
        shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
        with jax.default_device(gpu.devices[0]):
            cases = shapes.kernel_cases()
        for case in cases:
            for path in dump.iterdir():
                path.unlink()
            result = {"name": f"{op}/{case.name}"}
            try:
                compile_for(gpu, case.function, *case.arguments)
                result |= measure(dump)
            except Exception as error:  # any fault of a kernel is a finding
                said = str(error).strip().splitlines() or [""]
                result["error"] = f"{type(error).__name__}: {said[0][:300]}"
            print(json.dumps(result), flush=True)


def limits(target: str) -> tuple[str, ...]:
    """All that a kernel's program depends on: generation, shared memory, registers."""
    text = (TARGETS / f"{target}.txtpb").read_text()
    fields = ("cuda_compute_capability", "shared_memory_", "registers_")
    return tuple(s.strip() for s in text.splitlines() if s.strip().startswith(fields))


def run_target(target: str, ops: list[str]) -> dict[str, dict]:
    """Compile all cases for one GPU, in a child: Mosaic is bound to one generation."""
    found = {}
    command = [sys.executable, __file__, f"--child={target}", f"--ops={','.join(ops)}"]
    settings = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    with tempfile.TemporaryDirectory() as dump, tempfile.TemporaryFile("w+") as errors:
        environment = os.environ | settings | {"MOSAIC_GPU_DUMP_TO": dump}
        # Mosaic complains of a missing disassembler: shown on failure only.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as child:
            for line in filter(lambda text: text.startswith("{"), child.stdout):
                result = json.loads(line)
                name = result.pop("name")
                found[name] = result
                print(f"{target}  {name}: {describe(result)}", flush=True)
        if child.returncode:
            errors.seek(0)
            last = errors.read().strip()[-2000:]
            found[f"(process exited with {child.returncode})"] = {"error": last}
    return found


def describe(result: dict) -> str:
    """One kernel's numbers in words; zero counts of instructions are left out."""
    if "error" in result:
        return result["error"]
    return ", ".join(
        f"{result[field]} {field}"
        for field in FIELDS
        if result[field] or field not in INSTRUCTIONS
    )


def versions() -> dict[str, str]:
    """What the numbers depend on beside the kernels."""
    names = ("jax", "nvidia-cuda-nvcc")
    return {name: importlib.metadata.version(name) for name in names}


def faults(target: str, found: dict, expected: dict | None) -> list[str]:
    """Sentences on what is wrong; expected None: the table is of other versions."""
    lines = []
    for name, result in found.items():
        where = f"{target}  {name}"
        if "error" in result:
            lines.append(f"{where}: does not compile: {result['error']}")
        elif result["spilled_bytes"]:
            lines.append(f"{where}: spills {result['spilled_bytes']} bytes")
        elif expected is not None and name not in expected:
            lines.append(f"{where}: not in the table; add it with --update")
        elif expected is not None and result != expected[name]:
            changes = [
                f"{field} {expected[name].get(field)} -> {result[field]}"
                for field in FIELDS
                if expected[name].get(field) != result[field]
            ]
            lines.append(f"{where}: {', '.join(changes)}; accept with --update")
    gone = [name for name in expected or {} if name not in found]
    return lines + [f"{target}  {name}: in the table, not found" for name in gone]


def write_table(results: dict[str, dict]) -> None:
    """The table and its readable form; GPUs and operators not asked for stay."""
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    kept = before.get("targets", {}) if before.get("versions") == versions() else {}
    merged = {}
    for target in sorted({*kept, *results}):
        new, old = results.get(target, {}), kept.get(target, {})
        ops = {name.split("/")[0] for name in new}
        rest = {name: old[name] for name in old if name.split("/")[0] not in ops}
        merged[target] = dict(sorted((rest | new).items()))
    table = {"versions": versions(), "targets": merged}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    READABLE.write_text(readable(table))


def readable(table: dict) -> str:
    """The table as Markdown: a row for each kernel, GPUs with equal numbers joined."""
    used = ", ".join(f"{name} {number}" for name, number in table["versions"].items())
    lines = [
        "# Kernels compiled for GPUs that were not there",
        "",
        f"Written by `scripts/gpu_compile_check.py --update` with {used}. Nothing here",
        "was timed. The `.txtpb` files describe the GPUs (vendors' data sheets).",
        "",
        "| kernel | GPU | " + " | ".join(FIELDS).replace("_", " ") + " |",
        "|---" * (len(FIELDS) + 2) + "|",
    ]
    rows: dict[tuple, list[str]] = {}
    for target, found in table["targets"].items():
        for name, result in found.items():
            numbers = tuple(str(result[field]) for field in FIELDS)
            rows.setdefault((name, numbers), []).append(target)
    for (name, numbers), targets in sorted(rows.items()):
        lines.append(f"| {name} | {', '.join(targets)} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile, compare, report."""
    ops = chosen(_OPS, known_ops())
    if _CHILD.value:
        compile_cases(_CHILD.value, ops)
        return command_line.DONE
    targets = chosen(_TARGETS, known_targets())
    from pallas_kernels import absent_gpu

    if lacking := absent_gpu.missing():
        raise ValueError(f"gpu_compile_check: {lacking}")
    first = {limits(target): target for target in reversed(targets)}
    # A child compiles on one thread.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda target: run_target(target, ops), first.values())
        by_limits = dict(zip(first, found, strict=True))
    for target in targets:
        if (same := first[limits(target)]) != target:
            print(f"{target}: as {same}, whose generation and shared memory it has")
    results = {target: by_limits[limits(target)] for target in targets}
    if _UPDATE.value:
        wrong = [s for t, found in results.items() for s in faults(t, found, None)]
        if not wrong:
            write_table(results)
    else:
        wrong = compare(results, ops)
    print("\n".join(wrong) if wrong else f"{sum(map(len, results.values()))} fine")
    return command_line.FAILED if wrong else command_line.DONE


def compare(results: dict[str, dict], ops: list[str]) -> list[str]:
    """Every difference from the table, and every fault."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    same = table.get("versions") == versions()
    if not same:
        print(
            f"the table is of {table.get('versions')}, this is {versions()}: only "
            "spills and shared memory are judged"
        )
    wrong = []
    for target, found in results.items():
        listed = table.get("targets", {}).get(target, {})
        expected = {k: v for k, v in listed.items() if k.split("/")[0] in ops}
        wrong += faults(target, found, expected if same else None)
    return wrong


if __name__ == "__main__":
    command_line.run(main)
