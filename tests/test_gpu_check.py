"""What scripts/gpu_check.py and bench_kernels.py would say of a kernel, on a CPU."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, compat

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
needs_kernels = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_right_kernel_passes_and_a_wrong_one_does_not(script, dtype):
    gpu_check, cases = script("gpu_check"), script("kernel_cases")
    case = cases.convolution(1, 9, 128, 4, documents_a_row=2)

    row = gpu_check.check(case, dtype, "mma")

    assert row["passed"], row
    assert set(row["errors"]) == {"output 0", "output 1", "x", "weight", "bias"}

    def wrong(inputs, implementation):
        y, state = case.run(inputs, "reference")
        return y * (1.1 if implementation == "pallas" else 1.0), state

    row = gpu_check.check(case._replace(run=wrong), dtype, "mma")
    assert not row["passed"]
    assert 0.05 < row["error"] < 0.2


def test_on_hopper_both_forms_are_checked_and_timed(script, monkeypatch):
    monkeypatch.setattr(backend, "capability", lambda: (9, 0))
    cases, bench = script("kernel_cases"), script("bench_kernels")
    traced = []

    def run(inputs, implementation):
        if implementation == "pallas":
            traced.append(backend.products())
        return (inputs["dy"] @ inputs["weight"].T,)

    case = cases.input_gradient(8, 16, 8, 2)._replace(run=run)
    rows = bench.measure(case)

    assert [row["form"] for row in rows] == traced == ["wgmma", "mma"]
    for row in rows:
        assert row["passed"], row
        assert set(row["times"]["forward"]) == {"pallas", "reference", "floor"}
    assert cases.forms(cases.convolution(1, 9, 128, 4)) == ("mma",)
    assert script("gpu_check").check(case, "bfloat16", "wgmma")["form"] == "wgmma"
    assert traced[2:] == ["wgmma"]


def test_a_form_that_fails_does_not_hide_the_other(script, monkeypatch):
    monkeypatch.setattr(backend, "capability", lambda: (9, 0))
    cases, bench = script("kernel_cases"), script("bench_kernels")

    def run(inputs, implementation):
        if implementation == "pallas" and backend.products() == "wgmma":
            raise RuntimeError("no such instruction")
        return (inputs["dy"] @ inputs["weight"].T,)

    rows = bench.measure(cases.input_gradient(8, 16, 8, 2)._replace(run=run))

    assert [(row["form"], row["passed"]) for row in rows] == [
        ("wgmma", False),
        ("mma", True),
    ]
    assert "no such instruction" in "".join(bench.lines(rows[0]))
    assert rows[1]["times"]


def test_what_is_not_finite_is_infinitely_wrong(script):
    errors = script("bench_kernels").relative_errors

    found = errors({"a": [1.0, np.nan], "b": [1.0, 2.2]}, {"a": [1, 2], "b": [1, 2]})

    assert found == {"a": np.inf, "b": pytest.approx(0.1)}


def test_the_floor_is_the_longer_of_arithmetic_and_memory(script):
    floor_ms, work = script("kernel_timing").floor_ms, script("kernel_cases").Work

    card = "NVIDIA GeForce RTX 3060"
    assert floor_ms(work(25.5e12, 0), card) == pytest.approx(1000)
    assert floor_ms(work(0, 360e9), card) == pytest.approx(1000)
    assert floor_ms(work(102e12, 1, "int8"), card) == pytest.approx(1000)
    assert floor_ms(work(0, 448e9), "NVIDIA GeForce RTX 3080 Laptop GPU") == 1000
    assert floor_ms(work(0, 4300e9), "NVIDIA H200") == pytest.approx(1000)
    assert floor_ms(work(0, 3350e9), "NVIDIA H100 80GB HBM3") == pytest.approx(1000)


@pytest.mark.parametrize(
    "card",
    [
        "a card nobody has",
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
    ],
)
def test_a_card_of_unknown_rates_has_no_floor(script, card):
    work = script("kernel_cases").Work

    assert script("kernel_timing").floor_ms(work(1, 1), card) is None


@needs_kernels
def test_the_forms_that_are_checked_are_those_that_run(script, monkeypatch):
    from pallas_kernels.ssd.kernel_vjp import form_for

    monkeypatch.setattr(backend, "capability", lambda: (9, 0))
    cases = script("kernel_cases")
    for state in (8, 16, 17, 128):
        case = cases.scan(1, 3, 1, 1, state=state)
        for dtype in (jnp.bfloat16, jnp.float32):
            inputs = cases.cast(case, dtype)
            takes = form_for(*(inputs[name] for name in "xBC"))
            assert cases.forms(case, dtype)[0] == takes, (state, dtype)


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(script, tmp_path):
    keep = script("bench_kernels").keep

    keep(str(tmp_path / "new" / "found.json"), {"rows": []})
    keep("", {})

    assert (tmp_path / "new" / "found.json").read_text() == '{\n "rows": []\n}\n'
    with pytest.raises(ValueError, match="expected a name that ends in"):
        keep(str(tmp_path / "found.md"), {})


def test_what_was_found_so_far_can_be_read(script):
    head = {"device": "some GPU"}

    text = script("gpu_check").readable(
        {"head": head, "checks": [], "bench": [], "steps": []}
    )

    assert text.startswith("- device: some GPU")


@pytest.mark.parametrize("name", ["gpu_check", "bench_kernels"])
def test_a_jax_without_kernels_is_told_in_a_sentence(script, monkeypatch, name):
    monkeypatch.setattr(compat, "HAS_MOSAIC_GPU", False)

    with pytest.raises(NotImplementedError, match=rf"{name}: got JAX .*; expected JAX"):
        script("bench_kernels").check_version(name)


def test_the_help_of_gpu_check_names_its_flags_and_no_others():
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0
    assert {"--out", "--[no]interpret"} <= set(done.stdout.replace(":", " ").split())
    assert "--ops:" not in done.stdout


def test_documents_are_uneven_and_all_there(script):
    ids = script("kernel_cases").documents(2048, 16)

    lengths = np.bincount(ids)
    assert len(lengths) == 16
    assert lengths.min() > 0
    assert (np.cumsum(lengths)[:-1] % 64).any()


def test_every_timed_case_is_within_the_tokens_asked_for(script):
    cases = script("kernel_cases")

    few, many = (len(cases.timed_cases(n)) for n in (2**14, 2**17))

    assert 0 < few < many
    case = cases.timed_cases(2048)[-1]()
    assert case.forward.flops < case.both.flops
    assert cases.cast(case, jnp.bfloat16)["dt"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["gpu_check", "bench_kernels"])
def test_without_a_gpu_both_say_so_in_one_line(name):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "got platform cpu; expected" in line
