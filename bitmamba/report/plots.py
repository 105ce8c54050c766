"""Pictures; they need matplotlib, the extra "plots"."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib.pyplot without a display, or None when it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def loss_picture(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """Draw training loss, evaluation loss and retention over steps as a PNG.

    Args:
        rows: of metrics.jsonl.
        path: of the picture.
        title: above it.

    Returns:
        False, with nothing drawn, when matplotlib is not installed.
    """
    plt = pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    series = (
        ("loss", "training", {"alpha": 0.35, "linewidth": 1, "color": "C0"}),
        ("retention/loss", "held-out replay text", {"marker": "s", "color": "C2"}),
        ("eval/loss", "held-out examples", {"marker": "o", "color": "C1"}),
        (
            "retention/base_loss",
            "held-out replay text, base model",
            {"ls": "--", "color": "C2"},
        ),
    )
    drawn = []
    for key, label, style in series:
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        if points and points not in drawn:  # plain-text runs evaluate on replay only
            drawn.append(points)
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
