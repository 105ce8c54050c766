"""The picture of a sweep; it needs matplotlib, the extra "plots"."""

from collections.abc import Sequence
from pathlib import Path

from bitmamba.report.plots import pyplot
from bitmamba.report.sweep import ArmResult

STYLES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v", "P")


def sweep_picture(
    results: Sequence[ArmResult], path: Path, *, title: str, factor: float
) -> bool:
    """Draw held-out loss over steps, and the last one over the learning rate.

    Args:
        results: of all arms, which were evaluated on the same windows.
        path: of the picture.
        title: above it.
        factor: of the start; a line shows the limit.

    Returns:
        False, with nothing drawn, when matplotlib is not installed.
    """
    plt = pyplot()
    if plt is None:
        return False
    figure, (curves, ends) = plt.subplots(
        1, 2, figsize=(12, 4.8), layout="constrained", sharey=True
    )
    start = results[0].evaluations[0]["eval/loss"]
    top = start * (1 + 1.6 * (factor - 1))
    _draw_curves(curves, results, top=top)
    _draw_ends(ends, results, top=top)
    losses = [row["eval/loss"] for r in results for row in r.evaluations]
    lowest = min(loss for loss in losses if loss <= start)
    for axes in (curves, ends):
        axes.axhline(factor * start, color="C3", lw=1, ls="--", label="limit")
        axes.axhline(start, color="0.5", lw=1, ls=":", label="base")
        axes.grid(alpha=0.3)
        axes.set_ylim(lowest - 0.05 * start, top + 0.05 * start)
    curves.set(xlabel="step", ylabel="held-out loss, nats per token")
    ends.set(xlabel="learning rate", xscale="log")
    ends.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _draw_curves(axes, results: Sequence[ArmResult], *, top: float) -> None:
    """One line an arm: colour by learning rate, style by decay, marker by rank."""
    from matplotlib import colormaps

    lrs = sorted({r.lr for r in results})
    for r in results:
        colour = colormaps["viridis"](0.9 * lrs.index(r.lr) / max(1, len(lrs) - 1))
        steps = [row["step"] for row in r.evaluations]
        losses = [_within(row["eval/loss"], top) for row in r.evaluations]
        style = _pick(STYLES, results, "weight_decay", r)
        mark = _pick(MARKS, results, "rank", r)
        name = f"lr {r.lr:g}" if r.weight_decay == _first(results, r) else None
        axes.plot(steps, losses, style + mark, color=colour, ms=4, label=name)
        if r.diverged:
            axes.plot(steps[-1:], losses[-1:], "x", color="C3", ms=9, mew=2)
    axes.legend(fontsize="small")


def _draw_ends(axes, results: Sequence[ArmResult], *, top: float) -> None:
    """Points: marker by decay (and rank); crosses are arms that diverged."""
    groups: dict[tuple, list[ArmResult]] = {}
    for r in results:
        groups.setdefault((r.rank, r.weight_decay), []).append(r)
    for number, ((rank, decay), group) in enumerate(groups.items()):
        ordered = sorted(group, key=lambda r: r.lr)
        name = f"decay {decay:g}" + ("" if rank is None else f", rank {rank}")
        axes.plot(
            [r.lr for r in ordered],
            [_within(r.last_loss, top) for r in ordered],
            linestyle=STYLES[number % len(STYLES)],
            marker=MARKS[number % len(MARKS)],
            color=f"C{number % 10}",
            fillstyle="none",
            label=name,
        )
    bad = [r for r in results if r.diverged]
    heights = [_within(r.last_loss, top) for r in bad]
    if bad:
        axes.plot(
            [r.lr for r in bad], heights, "x", color="C3", ms=9, mew=2, label="diverged"
        )


def _within(loss: float, top: float) -> float:
    """Losses above the picture, and NaN, stand on its upper edge."""
    return loss if loss <= top else top


def _pick(choices: Sequence[str], results: Sequence[ArmResult], name: str, one) -> str:
    values = sorted({getattr(r, name) for r in results}, key=lambda v: (v is None, v))
    return choices[values.index(getattr(one, name)) % len(choices)]


def _first(results: Sequence[ArmResult], one: ArmResult) -> float:
    """The decay of the first arm with this learning rate: it names the colour."""
    return next(r.weight_decay for r in results if r.lr == one.lr)
