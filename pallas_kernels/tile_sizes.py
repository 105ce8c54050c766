"""Sizes of a block of a matrix product; needs no Pallas."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """A block's tile of the result, m and n, and of the sum, k; pipeline stages."""

    m: int
    n: int
    k: int
    stages: int


# Rows of the result of one warpgroup; a block of wgmma has two.
WARPGROUP_ROWS = 64
WGMMA_ROWS = 2 * WARPGROUP_ROWS
# Bytes of a row of a tile in shared memory: the widest swizzle.
_ROW_BYTES = 128
# With 128 x 256 tiles and what is written out: 224 of the 227 KB of a block.
_STAGES = 4


def blocks_together(m: int) -> int:
    """Of tiles below each other: each copies half of the right operand, for both."""
    return 2 if m > WGMMA_ROWS else 1


def wgmma_tiles(m: int, n: int, *, blocks: int, itemsize: int) -> Tiles:
    """Tiles for wgmma: those whose tiles, in whole rounds of all blocks, end first.

    A step of the sum of a 128 x n tile takes the tensor cores 4 n cycles, and moves
    256 + 3 n times 128 bytes through shared memory, one in each cycle: that is longer
    (README.md of out_prod, "On Hopper").
    """
    together = blocks_together(m)

    def cycles(tile_n):
        groups = -(-m // (together * WGMMA_ROWS)) * -(-n // tile_n)
        return -(-groups // max(1, blocks // together)) * (256 + 3 * tile_n)

    tile_n = min((256, 192, 128, 64), key=cycles)
    return Tiles(WGMMA_ROWS, tile_n, _ROW_BYTES // itemsize, _STAGES)
