"""The end of a run: a table of before and after, samples, and where everything is."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bitmamba.report import units
from bitmamba.report.plots import loss_picture


def show_summary(
    console: Console,
    workdir: Path,
    *,
    title: str,
    figures: Mapping[str, str],
    held_out: str = "held-out examples",
) -> None:
    """Print the summary of a run from its work directory, and draw its losses.

    Args:
        console: where.
        workdir: with metrics.jsonl and samples.jsonl.
        title: of the run.
        figures: name -> value, e.g. the total time.
        held_out: what "eval/loss" is the loss of.
    """
    rows = read_rows(workdir / "metrics.jsonl")
    evaluations = [r for r in rows if "eval/loss" in r or "retention/loss" in r]
    console.rule(f"[bold]{title}: done")
    if evaluations:
        console.print(loss_table(evaluations[0], evaluations[-1], held_out))
        if note := worse_note(evaluations[0], evaluations[-1], held_out):
            console.print(f"[yellow]note: {note}")
    for line in sample_lines(read_rows(workdir / "samples.jsonl")):
        console.print(line, soft_wrap=True)
    for name, value in figures.items():
        console.print(f"{name}: {value}")
    drawn = loss_picture(rows, workdir / "loss.png", title=title)
    files = ["checkpoints/", "metrics.jsonl", "samples.jsonl", "config.json"]
    if drawn:
        files.append("loss.png (the curves)")
    console.print(f"in {workdir}: {', '.join(files)}", soft_wrap=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a JSONL file of ours; none if it is not there.

    A line that is no JSON object (a damaged disk, an editor) is left out, with one
    warning for the file.
    """
    if not path.is_file():
        return []
    found, wrong = [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and "step" in row:
                found.append(row)
            else:
                wrong.append(number)
    if wrong:
        logging.warning(
            "%s: line %d is no row of ours (%d such in all); left out",
            path,
            wrong[0],
            len(wrong),
        )
    return found


def loss_table(
    first: Mapping[str, Any],
    last: Mapping[str, Any],
    held_out: str = "held-out examples",
) -> Table:
    """Losses of two evaluation rows, and their change; "eval/loss" as `held_out`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("loss (nats per token)")
    for name in (f"step {first['step']}", f"step {last['step']}", "change"):
        table.add_column(name, justify="right")
    keys = [k for k in last if k.endswith("/loss") and k.startswith("eval/")]
    for key in [*sorted(keys, key=lambda k: (k.count("/"), k)), "retention/loss"]:
        if key in last:
            before, after = first.get(key), last[key]
            known = before is not None and after is not None
            change = f"{after - before:+.4f}" if known else "-"
            label = held_out if key == "eval/loss" else _label(key)
            table.add_row(label, units.loss(before), units.loss(after), change)
    return table


def worse_note(
    first: Mapping[str, Any], last: Mapping[str, Any], held_out: str
) -> str | None:
    """A sentence when the run ends with a higher held-out loss than it began with.

    Args:
        first, last: evaluation rows.
        held_out: what `eval/loss` is of.
    """
    before, after = (row.get("eval/loss") for row in (first, last))
    if before is None or after is None or after <= before:
        return None
    return (
        f"the loss on {held_out} rose, from {units.loss(before)} to "
        f"{units.loss(after)}; try a lower config.optim.lr, or fewer steps"
    )


def _label(key: str) -> str:
    if key == "retention/loss":
        return "held-out replay text (retention)"
    return "  " + key.removeprefix("eval/").removesuffix("/loss")


def sample_lines(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each prompt with its continuations, first and last, as markup."""
    steps = sorted({s["step"] for s in samples})
    lines = []
    for prompt in dict.fromkeys(s["prompt"] for s in samples):
        lines.append(f"[bold]{escape(prompt)}[/bold]")
        for step in steps[:1] + steps[1:][-1:]:
            texts = [
                s["text"]
                for s in samples
                if s["step"] == step and s["prompt"] == prompt
            ]
            text = " ".join(texts[-1].split()) if texts else ""
            lines.append(f"  step {step}: {escape(text)}")
    return lines
