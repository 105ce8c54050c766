"""Sequence-mixing operators: one public function each, chosen by `implementation`.

Arrays in, arrays out; nothing here knows of models, files, flags or clocks.
"""

from pallas_kernels.causal_conv1d.api import (
    ConvOutput,
    causal_conv1d,
    causal_conv1d_step,
)
from pallas_kernels.ssd.api import SSDOutput, ssd, ssd_step

__all__ = [
    "ConvOutput",
    "SSDOutput",
    "causal_conv1d",
    "causal_conv1d_step",
    "ssd",
    "ssd_step",
]
