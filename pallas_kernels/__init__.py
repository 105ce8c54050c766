"""Sequence-mixing operators: one public function each, chosen by `implementation`.

Arrays in, arrays out; nothing here knows of models, files, flags or clocks.
"""

from pallas_kernels.bitlinear.api import bit_product, choose_bit_product
from pallas_kernels.causal_conv1d.api import (
    ConvOutput,
    causal_conv1d,
    causal_conv1d_step,
)
from pallas_kernels.out_prod.api import choose_out_prod, out_prod
from pallas_kernels.out_prod.planes import pack_planes, unpack_planes
from pallas_kernels.ssd.api import SSDOutput, ssd, ssd_step

__all__ = [
    "ConvOutput",
    "SSDOutput",
    "bit_product",
    "causal_conv1d",
    "causal_conv1d_step",
    "choose_bit_product",
    "choose_out_prod",
    "out_prod",
    "pack_planes",
    "ssd",
    "ssd_step",
    "unpack_planes",
]
