"""Screens and pictures from rows written out here."""

import json

import pytest
from rich.console import Console

from bitmamba.report import screen, summary
from bitmamba.report.plots import loss_picture
from bitmamba.report.progress import Meter, progress_bar

ROWS = [
    {"step": 0, "eval/loss": 3.0, "eval/a/loss": 3.5, "retention/loss": 2.0},
    {"step": 1, "loss": 2.9},
    {"step": 2, "loss": None, "non_finite": {"loss": "nan"}},
    {
        "step": 2,
        "eval/loss": 2.5,
        "eval/a/loss": 2.25,
        "retention/loss": 2.1,
        "retention/base_loss": 2.0,
    },
]


def text_of(*renderables):
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        for item in renderables:
            console.print(item)
    return capture.get()


def test_the_table_shows_before_after_and_change():
    shown = text_of(summary.loss_table(ROWS[0], ROWS[-1]))

    assert "step 0" in shown
    assert "step 2" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "held-out examples 3.0000 2.5000 -0.5000" in lines
    assert "a 3.5000 2.2500 -1.2500" in lines
    assert "held-out replay text (retention) 2.0000 2.1000 +0.1000" in lines


def test_a_run_that_made_the_model_worse_says_so():
    assert summary.worse_note(ROWS[0], ROWS[-1], "text") is None

    note = summary.worse_note(ROWS[-1], ROWS[0], "held-out text")

    assert note.startswith("the loss on held-out text rose, from 2.5000 to 3.0000")


def test_the_table_says_what_stands_in_for_examples():
    table = summary.loss_table(ROWS[0], ROWS[-1], "held-out text")

    assert "held-out text " in text_of(table)
    assert "held-out examples" not in text_of(table)


def test_samples_are_first_and_last_and_markup_in_them_is_text():
    samples = [
        {"step": s, "prompt": "[red]?", "text": t}
        for s, t in ((0, "b[bold]a"), (4, "mid"), (8, "end\nof it"))
    ]

    shown = text_of(*summary.sample_lines(samples))

    assert "[red]?" in shown
    assert "step 0: b[bold]a" in shown
    assert "step 8: end of it" in shown
    assert "mid" not in shown


def test_an_evaluation_line_states_retention_against_the_base():
    assert screen.evaluation_line(2, ROWS[-1]) == (
        "eval at step 2:  held-out loss 2.5000  "
        "retention 2.1000 (+0.1000 against the base)"
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("embed/embedding", "embedding"),
        ("lm_head/kernel", "head"),
        ("lm_head/norm/scale", "head"),
        ("layer_0/mixer/dt_bias", "state (A_log, D, dt_bias)"),
        ("layer_0/mixer/conv1d/bias", "convolutions"),
        ("layer_0/norm/scale", "norms"),
        ("layer_0/mixer/in_proj/kernel", "projections"),
    ],
)
def test_every_parameter_has_its_class(path, name):
    assert screen.parameter_class(path) == name


def test_the_picture_is_a_png_and_skips_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "loss.png"

    assert loss_picture(ROWS, path, title="t")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plain_lines_when_there_is_no_terminal():
    console = Console(width=100, highlight=False, force_terminal=False)
    meter = Meter(total=40, start=0)

    with console.capture() as capture, progress_bar(console, total=40, start=0) as show:
        for step in range(1, 41):
            meter.step_done(step, tokens=10, waited=0.0)
            show(step, meter.line(1.5))

    lines = capture.get().splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("step 1/40  loss 1.5000  ")
    assert "ETA" in lines[-1]
    assert meter.steps_done == 40


def test_a_last_row_cut_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + '{"step": 1, "lo')

    assert summary.read_rows(path) == ROWS[:1]
    assert summary.read_rows(tmp_path / "none.jsonl") == []
