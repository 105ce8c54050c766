"""Runs every way to keep what a model knew, and compares learning with retention."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bitmamba import config_read
from bitmamba.command_line import BAD_NUMBERS, DONE, one_line_mistakes
from bitmamba.report import forgetting as report
from bitmamba.report import units
from bitmamba.report.forgetting_plot import forgetting_picture
from bitmamba.report.summary import read_rows
from bitmamba.train import loop
from bitmamba.train.ways import Way

console = Console(highlight=False, soft_wrap=True)


def run(ways: Sequence[Way], out: Path, *, title: str) -> int:
    """Train what is not finished, then show the table; returns the exit code.

    Args:
        ways: from `make_ways`.
        out: folder for forgetting.json and forgetting.png.
        title: of the picture.

    Returns:
        DONE, even if some ways diverged; BAD_NUMBERS if all did; a run's own code if
        it was stopped or failed: the same command goes on from there.
    """
    started = time.perf_counter()
    codes = []
    for number, way in enumerate(ways, start=1):
        console.rule(f"[bold]way {number} of {len(ways)}: {way.name}")
        code = _train(way)
        if code not in (DONE, BAD_NUMBERS):
            return code
        codes.append(code)
    if BAD_NUMBERS in codes and DONE not in codes:
        return BAD_NUMBERS
    results = [
        result_of(way, diverged=code == BAD_NUMBERS)
        for way, code in zip(ways, codes, strict=True)
    ]
    _show(results, out, title=title)
    seconds = time.perf_counter() - started
    console.print(f"this command took {units.duration(seconds)}")
    return DONE


def _train(way: Way) -> int:
    if is_finished(way):
        console.print(f"finished already, in {way.config.workdir}")
        return DONE
    with one_line_mistakes():
        train: Callable[[], int] = loop.run(way.config, way.data)
    code = train()
    if code == DONE:
        text = json.dumps(_identity(way))
        (Path(way.config.workdir) / "finished.json").write_text(text, encoding="utf-8")
    return code


def is_finished(way: Way) -> bool:
    """Whether the very same run is in the way's folder, done."""
    path = Path(way.config.workdir) / "finished.json"
    return path.is_file() and json.loads(path.read_text("utf-8")) == _identity(way)


def _identity(way: Way) -> dict[str, Any]:
    """All that decides a run, as plain JSON data."""
    found = {
        "config": config_read.to_json(way.config),
        "plan": way.data.plan_digest,
        "files": way.data.fingerprints,
    }
    return json.loads(json.dumps(found))


def result_of(way: Way, *, diverged: bool = False) -> report.WayResult:
    """What the way's metrics.jsonl tells."""
    rows = read_rows(Path(way.config.workdir) / "metrics.jsonl")
    account = way.data.account
    examples = [c for c in account.categories if c.name != way.data.categories[-1]]
    speed = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row][-1]
    return report.WayResult(
        name=way.name,
        steps=way.config.train.steps,
        example_tokens=sum(c.planned_tokens for c in examples),
        tokens=account.tokens,
        tokens_per_s=speed,
        evaluations=[row for row in rows if "retention/loss" in row],
        diverged=diverged,
    )


def _show(results: Sequence[report.WayResult], out: Path, *, title: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    console.rule("[bold]learning against forgetting")
    console.print(report.LEGEND)
    lines = [*report.table(results), "", "change of the held-out loss by category:", ""]
    lines += [*report.category_table(results), "", *report.findings(results)]
    for line in lines:
        console.print(line, markup=False)
    text = json.dumps(report.as_json(results), indent=1, allow_nan=False)
    (out / "forgetting.json").write_text(text + "\n", encoding="utf-8")
    files = ["forgetting.json"]
    if forgetting_picture(results, out / "forgetting.png", title=title):
        files.append("forgetting.png")
    console.print(f"in {out}: {', '.join(files)}, and a folder for each way")
