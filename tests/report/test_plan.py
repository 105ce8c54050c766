"""The memory plan: exact where shapes say it, and against a budget."""

import jax
import jax.numpy as jnp
import pytest

from bitmamba.report import plan, units


def make(**changes):
    values = {
        "parameters": 4 * 2**20,
        "gradients": 4 * 2**20,
        "optimizer_name": "adafactor",
        "optimizer": 2**10,
        "others": {"adamw": 8 * 2**20},
    }
    return plan.MemoryPlan(**{**values, **changes})


def test_rows_show_both_optimisers_and_what_compiling_adds():
    before = dict(plan.plan_rows(make()))
    after = dict(plan.plan_rows(make(step=10 * 2**20, peak=20 * 2**20)))

    assert before["optimiser state (adafactor)"] == "1.0 KiB   (with adamw 8.0 MiB)"
    assert after["activations and other temporaries"] == "6.0 MiB"
    assert after["peak of the compiled step"] == "20.0 MiB"
    assert len(after) == len(before) + 2


def test_an_estimated_peak_says_what_it_is_estimated_from():
    step = plan.StepMemory(10 * 2**20, 20 * 2**20, estimated_from=(2, 3))

    rows = dict(plan.plan_rows(plan.with_step(make(), step)))

    name = "peak of the step, estimated from compiled steps of 2 and 3 layers"
    assert rows[name] == "20.0 MiB"


def test_the_compiled_step_reports_its_temporaries():
    n = 256
    shape = jax.ShapeDtypeStruct((n, n), jnp.float32)
    compiled = jax.jit(lambda a, b: (a @ b) @ (b @ a)).lower(shape, shape).compile()

    whole = plan.with_step(make(), plan.step_memory(compiled))

    one = 4 * n * n
    assert whole.step >= one
    assert whole.peak >= 3 * one + one


@pytest.mark.parametrize(("limit", "fits"), [(2**30, False), (3 * 2**30, True)])
def test_budget(limit, fits):
    peaked = make(step=0, peak=2 * 2**30)
    problem = plan.check_budget(peaked, limit, "config.x", " of it", ways=["a", "b"])

    assert (problem is None) == fits
    if problem:
        assert problem == (
            "config.x: the step needs 2.00 GiB; expected at most 1.00 GiB of it; "
            "try a, b"
        )


def test_what_is_not_known_is_no_problem():
    assert plan.check_budget(make(), 1, "config.x", "", ways=["a"]) is None


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(5, "5 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**31, "2.00 GiB")],
)
def test_sizes(n_bytes, text):
    assert units.size(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.6, "5s"), (75, "1m15s"), (3720, "1h02m")]
)
def test_durations(seconds, text):
    assert units.duration(seconds) == text


def test_a_loss_that_is_not_finite_is_never_printed_as_a_number():
    # B062: "loss 0" for NaN.
    assert units.loss(float("nan")) == "nan"
    assert units.loss(1.23456) == "1.2346"
    assert units.loss(None) == "-"
