"""What a product by wgmma is and what a block of it holds: sizes, memory, its tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import alignment, backend
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.tile_sizes import (
    WARPGROUP_ROWS,
    WGMMA_ROWS,
    Tiles,
    blocks_together,
)

CONSUMERS = 2
# The axis of blocks that share the right operand.
TOGETHER = "together"
# Columns of the result that are written at once, by each warpgroup.
PIECE = 64
# Blocks at work at the same time share what they read best where their tiles form a
# square: 16 rows of 128, in pairs, by about 8 columns of 256.
GROUP = 8


class Operand(NamedTuple):
    """One side: the axis that the sum runs over, the other's tile, and how it lies.

    width: columns of the pieces of 8 rows in which a tile lies in shared memory. The
    array has a multiple of them, and of 8 rows (`alignment`).
    """

    dtype: Any
    sum_axis: int
    tile: int
    width: int


class Product(NamedTuple):
    """One product by its sizes: (M, K) by (K, N), and a tail of that rank.

    dtype: of the result; out_transposed: it is written as (N, M).
    per_plane: steps of each of four planes of 2-bit codes in the left operand, or None.
    """

    m: int
    n: int
    k: int
    rank: int
    left: Operand
    right: Operand
    tiles: Tiles
    dtype: Any
    out_transposed: bool = False
    per_plane: int | None = None

    @property
    def together(self) -> int:
        """Blocks that work below each other and share the right operand."""
        return blocks_together(self.m)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of the result, those of blocks that work together as one."""
        rows = self.together * WGMMA_ROWS
        return pl.cdiv(self.m, rows), pl.cdiv(self.n, self.tiles.n)

    @property
    def rows(self) -> int:
        """Of the result, in whole tiles of all blocks that work together."""
        return self.grid[0] * self.together * WGMMA_ROWS

    @property
    def blocks(self) -> int:
        """Groups of blocks that are started; each takes tiles till there are none."""
        at_once = backend.multiprocessors() // self.together
        return min(max(1, at_once), self.grid[0] * self.grid[1])

    @property
    def steps(self) -> int:
        """Stages that a tile's sum takes."""
        return pl.cdiv(self.k, self.tiles.k)

    @property
    def tail_steps(self) -> int:
        """Stages that its tail takes."""
        return pl.cdiv(self.rank, self.tiles.k)

    @property
    def stages(self) -> int:
        """Of the ring: at most those of one tile."""
        return min(self.tiles.stages, self.steps + self.tail_steps)

    @property
    def pieces(self) -> int:
        """In which a tile is written out."""
        return self.tiles.n // PIECE

    @property
    def out_shape(self) -> tuple[int, int]:
        """Of the array that is written: the result and, where need be, zeros."""
        rows, columns = (self.n, self.m) if self.out_transposed else (self.m, self.n)
        whole = alignment.columns_at_once([columns], self.dtype.itemsize)
        columns = columns if whole else alignment.rounded(columns, PIECE)
        return alignment.rounded(rows, alignment.ROWS), columns

    @property
    def decodes(self) -> bool:
        """Whether the left operand is codes, which become numbers in registers."""
        return self.left.dtype != self.right.dtype

    @property
    def sums(self) -> Any:
        """The dtype that is summed in."""
        whole = jnp.issubdtype(self.right.dtype, jnp.integer)
        return jnp.int32 if whole else jnp.float32


class Refs(NamedTuple):
    """In global memory, in shared memory, and barriers; None where there is none."""

    a: Any
    b: Any
    scale: Any
    u: Any
    v: Any
    out: Any
    a_ring: Any
    b_ring: Any
    u_tiles: Any
    staged: Any
    filled: Any
    freed: Any


def scratch(p: Product) -> list:
    """The last six of `Refs`."""

    def ring(side):
        return _smem(_block(side, p.tiles.k), side.dtype, side.width, p.stages)

    tail_apart = p.decodes and p.tail_steps
    u = p.left._replace(dtype=p.right.dtype, width=p.right.width)
    u_block = _block(u, p.tiles.k)
    piece = (WARPGROUP_ROWS, PIECE)
    width = alignment.columns_at_once(p.out_shape[1:], p.dtype.itemsize)
    return [
        ring(p.left),
        ring(p.right),
        _smem(u_block, u.dtype, u.width, p.tail_steps) if tail_apart else None,
        _smem(piece, p.dtype, width, CONSUMERS, min(2, p.pieces)),
        plgpu.Barrier(num_arrivals=2, num_barriers=p.stages),
        plgpu.ClusterBarrier(
            collective_axes=(TOGETHER,),
            num_arrivals=CONSUMERS,
            num_barriers=p.stages,
        ),
    ]


def _smem(shape, dtype, width, *counts):
    """As many tiles of that shape, in pieces of 8 rows by so many columns."""
    tiling = plgpu.TilingTransform((alignment.ROWS, width))
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((*counts, *shape), dtype, transforms=(tiling, swizzle))


def _block(side: Operand, tile_k: int) -> tuple[int, int]:
    return (side.tile, tile_k) if side.sum_axis == 1 else (tile_k, side.tile)


def each_tile(p: Product, work: Callable) -> jax.Array:
    """The count that work(i, j, index, count) makes of each tile of this block.

    The count is of stages filled or used, from 0; index of this block's tiles.
    """

    @plgpu.nd_loop(
        (p.grid[0] * p.grid[1],), collective_axes="block", init_carry=jnp.int32(0)
    )
    def count(loop, carry):
        i, j = plgpu.planar_snake(loop.index[0], p.grid, 0, GROUP)
        i = i * p.together + lax.axis_index(TOGETHER)
        return work(i, j, loop.local_index, carry)

    return count
