"""Draw the losses of a run, or of runs that follow one another, as a PNG.

python scripts/plot_losses.py --runs=runs/base,runs/base_decay --out=loss.png
"""

from pathlib import Path

from absl import flags

from bitmamba import command_line
from bitmamba.report.plots import loss_picture
from bitmamba.report.summary import read_rows

_RUNS = flags.DEFINE_list("runs", [], "Work directories, in order.")
_OUT = flags.DEFINE_string("out", "loss.png", "The picture.")
_TITLE = flags.DEFINE_string("title", "", "Above it.")


def main() -> None:
    rows, first = [], 0
    for run in _RUNS.value:
        found = read_rows(Path(run) / "metrics.jsonl")
        if not found:
            raise ValueError(f"--runs: {run!r} has no metrics.jsonl; expected a run")
        # Each run has a base of its own; over several, that line means nothing.
        if len(_RUNS.value) > 1:
            found = [{k: v for k, v in r.items() if "base" not in k} for r in found]
        rows += [{**row, "step": row["step"] + first} for row in found]
        first = rows[-1]["step"]
    if not rows:
        raise ValueError("--runs: missing; expected work directories")
    if not loss_picture(rows, Path(_OUT.value), title=_TITLE.value):
        raise NotImplementedError("matplotlib is not installed; pip install matplotlib")
    print(_OUT.value)


if __name__ == "__main__":
    command_line.run(main)
