"""The two warpgroups of a block that multiply by wgmma and write the result."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.matmul_hopper_product import PIECE, Product, Refs, each_tile
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.tile_sizes import WARPGROUP_ROWS, WGMMA_ROWS

# Of each thread; these two and the producer have 512 between them.
REGISTERS = 232


def consume(p: Product, refs: Refs, warpgroup: jax.Array) -> None:
    """Sum this warpgroup's rows of each tile, and write them out."""
    plgpu.set_max_registers(REGISTERS, action="increase")

    def tile(i, j, index, count):
        acc = _sum(p, refs, warpgroup, count)
        count = count + p.steps
        slots = [lax.rem(count + s, p.stages) for s in range(p.tail_steps)]
        for slot in slots:
            plgpu.barrier_wait(refs.filled.at[slot])
        row = i * WGMMA_ROWS + warpgroup * WARPGROUP_ROWS
        scale = _scale(refs, row)
        for piece in range(p.pieces):
            columns = slice(piece * PIECE, (piece + 1) * PIECE)
            value = acc[:, columns]
            if scale is not None:
                value = value.astype(jnp.float32) * scale
            if slots:
                value = value + _tail(p, refs, warpgroup, slots, columns)
            column = j * p.tiles.n + piece * PIECE
            target = refs.staged.at[warpgroup, _turn(p, index, piece)]
            _write(p, refs.out, value, target, row, column)
        for slot in slots:
            plgpu.barrier_arrive(refs.freed.at[slot])
        return count + p.tail_steps

    each_tile(p, tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _sum(p: Product, refs: Refs, warpgroup: Any, count: Any) -> jax.Array:
    """(64, n) sums of one tile."""

    def free(count):
        plgpu.barrier_arrive(refs.freed.at[lax.rem(count, p.stages)])

    def step(s, acc):
        slot = lax.rem(count + s, p.stages)
        plgpu.barrier_wait(refs.filled.at[slot])
        a = _left(p, refs.a_ring.at[slot], warpgroup)
        b = _right(p, refs.b_ring.at[slot])
        if p.decodes:
            codes = plgpu.load(a, layout=plgpu.Layout.WGMMA_UPCAST_2X)
            mosaic.smem_read()
            plane = None if p.per_plane is None else lax.div(s, p.per_plane)
            numbers = _decode(codes, plane, p.right.dtype)
            plgpu.wgmma(acc, plgpu.layout_cast(numbers, plgpu.Layout.WGMMA), b)
            # The registers of the numbers are needed for the next.
            plgpu.wgmma_wait(0)
            free(count + s)
        else:
            plgpu.wgmma(acc, a, b)
            # The step before is done; this one still runs while the next is awaited.
            plgpu.wgmma_wait(1)
            pl.when(s > 0)(lambda: free(count + s - 1))

    def total(acc):
        lax.fori_loop(0, p.steps, lambda s, _: step(s, acc), None)
        if not p.decodes:
            plgpu.wgmma_wait(0)
            free(count + p.steps - 1)
        return acc[...]

    return pl.run_scoped(total, plgpu.ACC((WARPGROUP_ROWS, p.tiles.n), p.sums))


def _tail(p: Product, refs: Refs, warpgroup, slots, columns) -> jax.Array:
    """(64, PIECE) of u @ v, from the stages that hold them."""

    def total(acc):
        for step, slot in enumerate(slots):
            tile = refs.u_tiles.at[step] if p.decodes else refs.a_ring.at[slot]
            a, b = _left(p, tile, warpgroup), _right(p, refs.b_ring.at[slot], columns)
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(total, plgpu.ACC((WARPGROUP_ROWS, PIECE), p.sums))


def _left(p: Product, tile: Any, warpgroup: Any) -> Any:
    """This warpgroup's rows of a tile, (64, k)."""
    mine = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
    if p.left.sum_axis == 1:
        return tile.at[mine]
    return mosaic.transposed(tile.at[:, mine])


def _right(p: Product, tile: Any, columns: slice = slice(None)) -> Any:
    """Columns of a tile, (k, n)."""
    if p.right.sum_axis == 0:
        return tile.at[:, columns]
    return mosaic.transposed(tile.at[columns])


def _scale(refs: Refs, row: Any) -> Any:
    """One number, or one for each of 64 rows and all columns of a piece; or None."""
    if refs.scale is None:
        return None
    if refs.scale.shape == (1,):
        return refs.scale[0]
    part = refs.scale.at[pl.ds(row, WARPGROUP_ROWS)]
    per_row = plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(per_row, (WARPGROUP_ROWS, PIECE), (0,))


def _turn(p: Product, index: Any, piece: int) -> Any:
    """Which of the two buffers that a warpgroup writes through comes now."""
    return lax.rem(index * p.pieces + piece, min(2, p.pieces))


def _write(p: Product, out: Any, value: jax.Array, target: Any, row, column) -> None:
    """Send a piece of the result out, once its buffer has been read."""
    plgpu.wait_smem_to_gmem(min(2, p.pieces) - 1, wait_read_only=True)
    rows, columns = pl.ds(row, WARPGROUP_ROWS), pl.ds(column, PIECE)
    if p.out_transposed:
        mosaic.transposed(target)[...] = value.astype(p.dtype)
        where = columns, rows
    else:
        target[...] = value.astype(p.dtype)
        where = rows, columns
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(target, out.at[where])


def _decode(codes: jax.Array, plane: Any, dtype: Any) -> jax.Array:
    """int8 codes, or codes of one plane of 2 bits each, as numbers of dtype.

    Only whole bytes are converted quickly, and only masks are cheap on bytes: a code of
    plane p is read where it stands, as (code + 1) · 4^p - 128, and then scaled. Every
    number on the way has at most 8 bits.
    """
    if plane is None:
        return codes.astype(dtype)
    unit = lax.shift_left(jnp.int32(1), 2 * plane)
    found = (codes & (3 * unit).astype(jnp.int8)) ^ jnp.int8(-128)
    unit = unit.astype(jnp.float32)
    back, offset = (1 / unit).astype(dtype), (128 / unit - 1).astype(dtype)
    return found.astype(dtype) * back + offset
