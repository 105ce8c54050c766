"""The picture of a comparison; it needs matplotlib, the extra "plots"."""

from collections.abc import Sequence
from pathlib import Path

from bitmamba.report.forgetting import WayResult
from bitmamba.report.plots import pyplot


def forgetting_picture(results: Sequence[WayResult], path: Path, *, title: str) -> bool:
    """Draw retention over the loss of held-out examples: a path and a point per way.

    Args:
        results: of ways evaluated on the same windows; those that diverged are left
            out.
        path: of the picture.
        title: above it.

    Returns:
        False, with nothing drawn, when matplotlib is not installed.
    """
    plt = pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    base = results[0].evaluations[0]
    axes.plot(base["eval/loss"], base["retention/loss"], "k*", ms=12, label="base")
    for number, result in enumerate(r for r in results if not r.diverged):
        colour = f"C{number % 10}"
        x = [row["eval/loss"] for row in result.evaluations]
        y = [row["retention/loss"] for row in result.evaluations]
        axes.plot(x, y, ".-", color=colour, alpha=0.35, lw=1)
        axes.plot(x[-1], y[-1], "o", color=colour, ms=9, label=result.name)
    axes.set(
        xlabel="held-out examples: loss, nats per token (left is better)",
        ylabel="held-out replay text: loss (down is better)",
        title=title,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
