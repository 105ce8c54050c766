"""The comparison of ways: table, what is not beaten, JSON, picture."""

import json
import math

import pytest

from bitmamba.report import forgetting as report
from bitmamba.report.forgetting import WayResult
from bitmamba.report.forgetting_plot import forgetting_picture


def way(name, examples, retention, *, diverged=False, tokens=2000):
    rows = [(0, 5.0, 4.0), (10, examples, retention)]
    return WayResult(
        name=name,
        steps=10,
        example_tokens=1800,
        tokens=tokens,
        tokens_per_s=20.0,
        evaluations=[
            {
                "step": step,
                "eval/loss": a,
                "eval/ai/loss": a + 1,
                "eval/base_loss": 5.0,
                "eval/ai/base_loss": 6.0,
                "retention/loss": b,
                "tokens_per_s": 1.0,
            }
            for step, a, b in rows
        ],
        diverged=diverged,
    )


@pytest.fixture
def results():
    return [
        way("plain", 4.0, 4.4),
        way("replay", 4.2, 4.1, tokens=2400),
        way("tmkl_1", 4.1, 4.1),
        way("pull_0.01", math.nan, 3.0, diverged=True),
    ]


def cells(lines):
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines]


def test_the_table_has_base_and_ways_against_plain(results):
    head, _, base, plain, replay, tmkl, pull = cells(report.table(results))

    assert head[:4] == ["way", "examples", "change", "gain"]
    assert base[1::3][:2] == ["5.0000", "4.0000"]
    assert plain[1:7] == ["4.0000", "-1.0000", "100 %", "4.4000", "+0.4000", "100 %"]
    assert replay[3] == "80 %"
    assert replay[6:] == ["25 %", "1,800", "10", "2m00s"]
    assert tmkl[3] == "90 %"
    assert pull[1:4] == ["nan", "+nan", "nan %"]


def test_categories_have_a_column_for_each_way(results):
    head, _, only = cells(report.category_table(results))

    assert head == ["category", "base", "plain", "replay", "tmkl_1", "pull_0.01"]
    assert only == ["ai", "6.0000", "-1.0000", "-0.8000", "-0.9000", "+nan"]


def test_a_way_with_a_better_one_in_both_losses_is_beaten(results):
    assert report.not_beaten(results) == ["plain", "tmkl_1"]

    said = report.findings(results)

    assert said[0] == "pull_0.01 diverged: its numbers were not finite."
    assert said[1].endswith("the other: plain, tmkl_1.")
    assert said[2] == "Lowest sum of both losses: tmkl_1."


def test_equal_ways_do_not_beat_each_other():
    same = [way("plain", 4.0, 4.4), way("replay", 4.0, 4.4)]

    assert report.not_beaten(same) == ["plain", "replay"]


def test_one_way_alone_is_compared_with_nothing():
    assert report.findings([way("plain", 4.0, 4.4)]) == []


def test_json_is_plain_and_says_what_is_not_finite(results):
    rows = json.loads(json.dumps(report.as_json(results), allow_nan=False))

    assert [r["way"] for r in rows] == ["plain", "replay", "tmkl_1", "pull_0.01"]
    assert rows[1]["training_seconds"] == 120
    assert rows[3]["evaluations"][1]["eval/loss"] == "nan"
    assert "tokens_per_s" not in rows[0]["evaluations"][0]


def test_the_picture_has_a_point_for_each_way_that_ended(results, tmp_path):
    from matplotlib import pyplot as plt

    seen = []
    close = plt.close
    plt.close = lambda figure: seen.append(figure)
    try:
        assert forgetting_picture(results, tmp_path / "a.png", title="t")
    finally:
        plt.close = close

    labels = seen[0].axes[0].get_legend_handles_labels()[1]
    plt.close(seen[0])
    assert labels == ["base", "plain", "replay", "tmkl_1"]
    assert (tmp_path / "a.png").stat().st_size > 10_000
