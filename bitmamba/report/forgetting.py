"""What ways to keep knowledge are worth: held-out examples against retention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitmamba.report import units

LEGEND = (
    "losses in nats per token on the same windows: examples never trained on, and text "
    "of the kind the base knows (retention); base: before step 1. gain, forgets: in "
    "percent of plain's. time: training alone, without compiling and evaluating"
)


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """What one way gave.

    example_tokens, tokens: seen in training, of examples and in all.
    tokens_per_s: of training, its mean.
    evaluations: {"step": …, "eval/loss": …, "retention/loss": …, …} each; the first
        is the base.
    diverged: whether its numbers went bad; its last evaluation is then not its end.
    """

    name: str
    steps: int
    example_tokens: int
    tokens: int
    tokens_per_s: float
    evaluations: Sequence[Mapping[str, Any]]
    diverged: bool = False

    def change(self, key: str) -> float:
        """Last minus first value of an evaluation; NaN for a way that diverged."""
        if self.diverged:
            return math.nan
        return self.evaluations[-1][key] - self.evaluations[0][key]

    @property
    def seconds(self) -> float:
        """Of training."""
        return self.tokens / self.tokens_per_s


def table(results: Sequence[WayResult]) -> list[str]:
    """Lines of a table that is read as it is, and by Markdown: a row for each way."""
    plain = next((r for r in results if r.name == "plain"), None)
    first = results[0].evaluations[0]
    before = [units.loss(first[k]) for k in ("eval/loss", "retention/loss")]
    head = ["way", "examples", "change", "gain", "retention", "change", "forgets"]
    head += ["SFT tokens", "steps", "time"]
    rows = [head, ["base", before[0], "", "", before[1], "", "", "", "", ""]]
    for r in results:
        cells = [r.name]
        for key in ("eval/loss", "retention/loss"):
            change = r.change(key)
            last = math.nan if r.diverged else r.evaluations[-1][key]
            share = change / plain.change(key) if plain else math.nan
            cells += [units.loss(last), f"{change:+.4f}", f"{100 * share:.0f} %"]
        cells += [f"{r.example_tokens:,}", str(r.steps), units.duration(r.seconds)]
        rows.append(cells)
    return _lines(rows)


def category_table(results: Sequence[WayResult]) -> list[str]:
    """Change of the loss of each category, a column for each way."""
    keys = [k for k in results[0].evaluations[0] if k.startswith("eval/")]
    names = {k: k.removeprefix("eval/").removesuffix("/loss") for k in keys}
    rows = [["category", "base", *(r.name for r in results)]]
    for key in sorted(k for k in keys if k != "eval/loss" and k.endswith("/loss")):
        base = results[0].evaluations[0][key]
        changes = [f"{r.change(key):+.4f}" for r in results]
        rows.append([names[key], units.loss(base), *changes])
    return _lines(rows)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def not_beaten(results: Sequence[WayResult]) -> list[str]:
    """Ways than which no other has both losses as low, and one lower."""
    points = {
        r.name: (r.change("eval/loss"), r.change("retention/loss"))
        for r in results
        if not r.diverged
    }
    return [
        name
        for name, (a, b) in points.items()
        if not any(x <= a and y <= b and (x, y) != (a, b) for x, y in points.values())
    ]


def findings(results: Sequence[WayResult]) -> list[str]:
    """Sentences: what no other way beats, and what has the lowest sum."""
    fine = [r for r in results if not r.diverged]
    bad = [r.name for r in results if r.diverged]
    said = [f"{name} diverged: its numbers were not finite." for name in bad]
    if len(fine) < 2:
        return said
    said.append(
        "Not beaten in one loss without loss in the other: "
        f"{', '.join(not_beaten(results))}."
    )
    best = min(fine, key=lambda r: r.change("eval/loss") + r.change("retention/loss"))
    said.append(f"Lowest sum of both losses: {best.name}.")
    return said


def as_json(results: Sequence[WayResult]) -> list[dict[str, Any]]:
    """Plain data, one entry a way; numbers that are not finite by their names."""
    return [
        {
            "way": r.name,
            "steps": r.steps,
            "example_tokens": r.example_tokens,
            "tokens": r.tokens,
            "training_seconds": r.seconds,
            "diverged": r.diverged,
            "evaluations": [
                {
                    k: v if v is None or math.isfinite(v) else str(v)
                    for k, v in row.items()
                    if k == "step" or k.startswith(("eval/", "retention/"))
                }
                for row in r.evaluations
            ],
        }
        for r in results
    ]
