"""What a sweep leaves: sweep.json, the table, the picture."""

import json
import os
from collections.abc import Sequence

from rich.console import Console

from bitmamba.report import sweep as report
from bitmamba.report import units
from bitmamba.report.sweep_plot import sweep_picture
from bitmamba.train.sweep_state import Progress, Sweep


def arm_results(sweep: Sweep, now: Progress) -> list[report.ArmResult]:
    """What became of each arm so far."""
    unfinished = now.done < sweep.config.train.steps or now.waits_for_evaluation()
    return [
        report.ArmResult(
            lr=arm.lr,
            weight_decay=arm.weight_decay,
            rank=arm.rank,
            training=now.training[i],
            evaluations=now.evaluations[i],
            diverged=now.looks[i].found,
            stopped=now.done if unfinished and i in now.alive else None,
        )
        for i, arm in enumerate(sweep.arms)
    ]


def write(
    sweep: Sweep, results: Sequence[report.ArmResult], done: int, seconds: float
) -> None:
    """sweep.json, after every evaluation: what is known stays."""
    best = report.best_arm(results)
    found = {
        "rule": sweep.limits.rule(),
        "steps": sweep.config.train.steps,
        "done": done,
        "seconds": seconds,
        "ranks": [
            {
                "rank": sweep.arms[g.arms[0]].rank,
                "arms": g.compiled.name,
                "reason": g.compiled.reason,
            }
            for g in sweep.groups
        ],
        "arms": report.as_json(results),
        "findings": report.findings(results),
        "best": best,
        "command": None if best is None else sweep.command(results[best]),
    }
    text = json.dumps(found, indent=1, allow_nan=False)
    # A kill leaves the old one or the new one.
    file = sweep.out / "sweep.json.new"
    file.write_text(text + "\n", encoding="utf-8")
    os.replace(file, sweep.out / "sweep.json")


def show(
    sweep: Sweep, results: Sequence[report.ArmResult], seconds: float, console: Console
) -> None:
    """The table, what decided, and the command that trains the best arm."""
    console.rule(f"[bold]{sweep.config.name}: sweep of {len(results)} arms")
    epochs = sweep.data.account.epochs
    lines = report.table(results)
    console.print(
        f"held-out loss by step; {sweep.config.train.steps} steps are {epochs:.1f} "
        "passes over the examples; retention: held-out replay text, "
        f"{units.loss(results[0].evaluations[0].get('retention/loss'))} before"
    )
    for line in [*lines, *report.findings(results)]:
        console.print(line, markup=False)
    best = report.best_arm(results)
    if best is not None:
        console.print("train the best arm:")
        console.print(sweep.command(results[best]), markup=False)
    files = ["sweep.json"]
    if sweep_picture(
        results,
        sweep.out / "sweep.png",
        title=f"{sweep.config.name}: {len(results)} arms",
        factor=sweep.limits.factor,
    ):
        files.append("sweep.png")
    console.print(f"total time: {units.duration(seconds)}")
    console.print(f"in {sweep.out}: {', '.join(files)}")
