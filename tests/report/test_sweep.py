"""A sweep's verdicts, table, sentences, picture and command, from plain numbers."""

import json

import pytest

from bitmamba.report.sweep import (
    ArmResult,
    as_json,
    best_arm,
    best_command,
    config_arguments,
    findings,
    table,
    verdicts,
)
from bitmamba.report.sweep_plot import sweep_picture


def arm(lr, decay, losses, *, rank=None, diverged=None, stopped=None):
    rows = [
        {"step": 10 * i, "eval/loss": loss, "retention/loss": 2.0 + i}
        for i, loss in enumerate(losses)
    ]
    return ArmResult(
        lr=lr,
        weight_decay=decay,
        rank=rank,
        training=[(1, losses[0])],
        evaluations=rows,
        diverged=diverged,
        stopped=stopped,
    )


BAD = (20, "held-out loss 11.9800 > 1.5 x 1.6500")
PUBLISHED = [
    arm(1e-6, 0.0, [1.65, 1.579, 1.594]),
    arm(1e-6, 0.01, [1.65, 1.579, 1.5939]),
    arm(1e-5, 0.0, [1.65, 2.44, 11.98], diverged=BAD),
    arm(1e-5, 0.01, [1.65, 2.44, 11.98], diverged=BAD),
]


def test_every_arm_has_a_verdict_and_the_best_ends_lowest():
    worse = arm(3e-6, 0.0, [1.65, 1.60, 1.66])
    told = arm(3e-6, 0.01, [1.65], stopped=7)

    assert best_arm(PUBLISHED) == 1
    assert verdicts([*PUBLISHED, worse, told]) == [
        "stable",
        "best: stable",
        f"diverged at step 20: {BAD[1]}",
        f"diverged at step 20: {BAD[1]}",
        "stable, but ends above its start",
        "not finished: at step 7",
    ]
    assert best_arm(PUBLISHED[2:]) is None


def test_the_table_reads_as_text_and_as_markdown():
    lines = table([PUBLISHED[0], PUBLISHED[2]])

    assert lines[0] == (
        "|    lr | decay | step 0 | step 10 | step 20 | retention | verdict"
        "                                                   |"
    )
    assert lines[2].startswith("| 1e-06 |     0 | 1.6500 |  1.5790 |  1.5940 |    4.00")
    assert "| diverged at step 20: held-out loss 11.9800 > 1.5 x 1.6500 |" in lines[3]
    assert len({len(line) for line in lines}) == 1


def test_an_arm_that_stopped_early_has_empty_cells_and_many_steps_are_thinned():
    long = arm(1.0, 0.0, [1.0] * 20, rank=8)
    short = arm(2.0, 0.0, [1.0, 9.0], rank=16, diverged=(10, "x"))

    lines = table([long, short])

    assert [c.strip() for c in lines[0].split("|")[1:-1]] == [
        *("lr", "decay", "rank", "step 0", "step 40", "step 80", "step 110"),
        *("step 150", "step 190", "retention", "verdict"),
    ]
    assert [c.strip() for c in lines[3].split("|")[4:11]] == ["1.0000", *"------"]
    assert lines[2].split("|")[10].strip() == "21.0000"


def test_arms_that_differ_only_in_decay_and_agree_clear_it():
    cause, decay, edge = findings(PUBLISHED)

    assert cause == (
        "The learning rate is the cause: every arm up to 1e-06 is stable, every arm "
        "from 1e-05 on diverged."
    )
    assert decay.startswith("Decay is not the cause: ")
    assert decay.endswith(
        "have the same verdict, and losses within 0.01% (rule: same verdict, and last "
        "losses below the start within 5%)."
    )
    assert findings(PUBLISHED[:2])[0].startswith("Decay makes no difference")
    assert edge == (
        "The best learning rate, 1e-06, is the lowest listed: try lower ones."
    )


@pytest.mark.parametrize(
    "other",
    [arm(1e-5, 0.1, [1.65, 1.6, 1.6]), arm(1e-6, 0.1, [1.65, 1.6, 1.8])],
    ids=["verdict", "loss"],
)
def test_decay_matters_where_verdict_or_loss_differ(other):
    sentences = findings([*PUBLISHED, other])

    (sentence,) = (s for s in sentences if "ecay" in s)
    assert sentence.startswith(f"Decay matters at lr {other.lr:g}: ")


def test_losses_of_arms_that_learnt_nothing_are_not_compared():
    lost = [arm(1e-5, w, [1.65, end]) for w, end in ((0.0, 1.7), (0.01, 1.9))]

    assert findings(lost)[0].startswith("Decay makes no difference: ")


def test_a_best_rate_inside_the_list_is_not_at_its_edge():
    inside = [arm(lr, 0.0, [1.0, loss]) for lr, loss in ((1, 0.9), (2, 0.5), (3, 0.9))]
    upper = [arm(lr, 0.0, [1.0, loss]) for lr, loss in ((1, 0.9), (2, 0.5))]

    assert findings(inside) == []
    assert findings(upper) == [
        "The best learning rate, 2, is the highest listed: try higher ones."
    ]


def test_nothing_is_concluded_from_one_decay_or_unfinished_arms():
    assert findings([PUBLISHED[0]]) == []
    assert findings([*PUBLISHED, arm(1.0, 0.0, [1.65], stopped=3)]) == []


def test_the_command_repeats_the_overrides_and_ends_with_the_arm():
    argv = [
        *("--lr=1e-6,1e-5", "--config", "configs/lora.py:tiny", "--rank", "8,16"),
        *("--config.optim.lr=1", "--config.train.steps", "40", "--verbosity=1"),
        "--config.workdir=a",
        *("--config.eval.prompts=('a b',)", "--noconfig.lora.dora", "--out=x"),
    ]

    file, overrides = config_arguments(argv)
    command = best_command(
        arm(1e-5, 0.01, [1.0], rank=8),
        config_file=file,
        overrides=overrides,
        workdir="runs/x/best",
    )

    assert command == (
        "python train.py --config=configs/lora.py:tiny --config.train.steps=40 "
        "'--config.eval.prompts=('\"'\"'a b'\"'\"',)' --noconfig.lora.dora "
        "--config.optim.lr=1e-05 --config.optim.weight_decay=0.01 --config.lora.rank=8 "
        "--config.workdir=runs/x/best"
    )


def test_numbers_that_are_not_finite_are_named_in_json():
    rows = as_json([arm(1.0, 0.0, [1.0, float("nan"), float("inf")], diverged=BAD)])

    text = json.dumps(rows, allow_nan=False)
    losses = [row["eval/loss"] for row in json.loads(text)[0]["evaluations"]]
    assert losses == [1.0, "nan", "inf"]
    assert json.loads(text)[0]["diverged"] == {"step": 20, "cause": BAD[1]}


def test_the_picture_is_drawn_with_losses_that_are_not_finite(tmp_path):
    wild = arm(1e-4, 0.0, [1.65, float("nan")], diverged=(10, "loss is not finite"))

    drawn = sweep_picture([*PUBLISHED, wild], tmp_path / "a.png", title="t", factor=1.5)

    assert drawn
    assert (tmp_path / "a.png").stat().st_size > 1000
