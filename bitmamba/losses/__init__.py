"""Losses: (features, batch) -> per-token values; the step does the weighted mean."""

from bitmamba.losses.cross_entropy import cross_entropy
from bitmamba.losses.distill import distillation
from bitmamba.losses.tmkl import tmkl, tmkl_loss_and_gradient, tmkl_topk
from bitmamba.losses.top_k import top_k_logits

LOSSES = {"cross_entropy": cross_entropy}

__all__ = [
    "LOSSES",
    "cross_entropy",
    "distillation",
    "tmkl",
    "tmkl_loss_and_gradient",
    "tmkl_topk",
    "top_k_logits",
]
