"""Named sizes of the scan, for tests, benchmarks and compile checks."""

from typing import NamedTuple


class SSDShape(NamedTuple):
    """Sizes of one scan: B, L, H, P, G, N and the chunk."""

    batch: int
    length: int
    n_heads: int
    headdim: int
    n_groups: int
    d_state: int
    chunk_size: int


SHAPES = {
    "mamba2_130m": SSDShape(1, 4096, 24, 64, 1, 128, 64),
    "student_1b4": SSDShape(1, 4096, 64, 64, 1, 128, 64),
    "bitmamba2_255m": SSDShape(1, 4096, 16, 128, 16, 1, 64),
    "bitmamba2_1b": SSDShape(1, 4096, 32, 128, 32, 1, 64),
}
