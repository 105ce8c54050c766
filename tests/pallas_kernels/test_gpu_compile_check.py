"""The compile check's verdicts; the compiling itself is in absent_gpu/ and in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import absent_gpu, backend
from pallas_kernels.cases import KernelCase, in_both_forms

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_compile_check.py"


@pytest.fixture(scope="module")
def check(script):
    return script("gpu_compile_check")


def numbers(check, **changed):
    return dict.fromkeys(check.FIELDS, 0) | {"registers": 128} | changed


def test_the_numbers_are_read_from_what_the_compiler_writes(check, tmp_path):
    for i, (registers, spills) in enumerate([(134, 0), (255, 8)]):
        (tmp_path / f"k{i}.ptxas").write_text(
            f"0 bytes stack frame, {spills} bytes spill stores, 9 bytes spill loads\n"
            f"ptxas info : Used {registers} registers, used 2 barriers"
        )
        (tmp_path / f"k{i}.resources.txt").write_text(
            f"Resources(smem_scratch_bytes={1000 + i}, tmem_scratch_cols=0)"
        )
        (tmp_path / f"k{i}.ptx").write_text(
            "mma.sync.aligned.m16n8k16\ncp.async.cg.shared\nmma.sync.aligned\n"
            "cp.async.bulk.tensor.2d"
        )

    assert check.measure(tmp_path) == {
        "registers": 255,
        "spilled_bytes": 8,
        "shared_bytes": 1001,
        "mma": 4,
        "wgmma": 0,
        "tma": 2,
        "cp_async": 2,
    }


def test_a_change_a_spill_and_a_failure_are_told_apart(check):
    found = {
        "op/same": numbers(check),
        "op/changed": numbers(check, registers=140),
        "op/spills": numbers(check, spilled_bytes=4),
        "op/broken": {"error": "ValueError: smem_bytes=1 > max_smem_bytes=0"},
        "op/new": numbers(check),
    }
    names = ("op/same", "op/changed", "op/spills", "op/gone")
    expected = {name: numbers(check) for name in names}

    assert check.faults("gpu", found, expected) == [
        "gpu  op/changed: registers 128 -> 140; accept with --update",
        "gpu  op/spills: spills 4 bytes",
        "gpu  op/broken: does not compile: ValueError: smem_bytes=1 > max_smem_bytes=0",
        "gpu  op/new: not in the table; add it with --update",
        "gpu  op/gone: in the table, not found",
    ]
    assert len(check.faults("gpu", found, None)) == 2


def test_the_readable_table_is_that_of_the_numbers(check):
    import json

    table = json.loads(check.TABLE.read_text())

    assert check.READABLE.read_text() == check.readable(table)
    assert sorted(table["targets"]) == check.known_targets()
    for found in table["targets"].values():
        assert {name.split("/")[0] for name in found} == set(check.known_ops())
        assert all(result["spilled_bytes"] == 0 for result in found.values())
    for name, result in table["targets"]["h200"].items():
        if name.startswith(("out_prod/", "bitlinear/")):
            portable = name.endswith("_mma")
            assert (result["mma"] > 0, result["wgmma"] > 0) == (portable, not portable)
            assert result["shared_bytes"] <= 227 * 1024


@pytest.mark.skipif(not absent_gpu.missing(), reason="the extra gpucheck is installed")
def test_without_the_extra_it_says_so_in_a_sentence():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "gpu_compile_check" in done.stderr
    assert "extra 'gpucheck'" in done.stderr or "expected JAX 0.11" in done.stderr


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--targets=gtx1080"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )

    assert done.returncode == 2
    assert "got gtx1080; expected some of a100" in done.stderr


def test_one_compilation_serves_gpus_that_differ_in_speed_and_memory_alone(check):
    assert check.limits("rtx3060") == check.limits("rtx3080_laptop")

    others = {check.limits(t) for t in ("rtx3060", "rtx4090", "a100", "h200")}
    assert len(others) == 4
    assert all(len(fields) == 6 for fields in others)


@pytest.mark.parametrize(
    ("capability", "forms"),
    [((8, 6), {"op": "mma"}), ((9, 0), {"op": "wgmma", "op_mma": "mma"})],
)
def test_on_hopper_the_portable_form_is_compiled_too(monkeypatch, capability, forms):
    monkeypatch.setattr(backend, "capability", lambda: capability)

    cases = in_both_forms(lambda: [KernelCase("op", backend.products, ())])

    assert {case.name: case.function() for case in cases} == forms
