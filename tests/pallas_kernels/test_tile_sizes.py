"""Tiles for wgmma: they fit a block, and end first by count."""

import itertools

import pytest

from pallas_kernels.tile_sizes import WGMMA_ROWS, blocks_together, wgmma_tiles

H200 = 132
SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("itemsize", [1, 2])
def test_all_tiles_fit_shared_memory(itemsize):
    found = set()
    for m, n in itertools.product((7, 128, 200, 2048, 4096), (16, 64, 200, 2048, 8512)):
        tiles = wgmma_tiles(m, n, blocks=H200, itemsize=itemsize)
        found.add(tiles.n)
        ring = tiles.stages * (tiles.m + tiles.n) * tiles.k * itemsize
        # What is written out: two pieces of 64 x 64 of two bytes for each warpgroup.
        assert ring + 2 * 2 * 64 * 64 * 2 + 1024 <= SHARED_BYTES
        assert tiles.k * itemsize == 128

    assert found == {64, 128, 192, 256}


@pytest.mark.parametrize(
    ("m", "n", "blocks", "expected"),
    [
        (4096, 4096, H200, 256),  # 3.9 rounds of the largest, which is the quickest
        (4096, 8512, H200, 192),  # 8.2 rounds of the largest would be 9
        (128, 40, H200, 64),  # no wider than the result
        (4096, 4096, 2, 256),
    ],
)
def test_the_tiles_are_those_that_end_first(m, n, blocks, expected):
    tiles = wgmma_tiles(m, n, blocks=blocks, itemsize=2)

    assert (tiles.m, tiles.n) == (WGMMA_ROWS, expected)


def test_blocks_work_together_where_there_are_rows_for_two():
    assert [blocks_together(m) for m in (1, 128, 129, 4096)] == [1, 1, 2, 2]
