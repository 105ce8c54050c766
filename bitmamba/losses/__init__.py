"""Losses: (features, batch) -> per-token values; the step does the weighted mean."""

from bitmamba.losses.cross_entropy import cross_entropy

LOSSES = {"cross_entropy": cross_entropy}

__all__ = ["LOSSES", "cross_entropy"]
