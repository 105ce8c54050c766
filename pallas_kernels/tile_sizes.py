"""Sizes of a block of a matrix product; needs no Pallas."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """A block's tile of the result, m and n, and of the sum, k; pipeline stages."""

    m: int
    n: int
    k: int
    stages: int
