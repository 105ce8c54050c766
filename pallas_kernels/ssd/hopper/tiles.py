"""What the Hopper kernels of the scan share: how tiles come and go, what decays are.

Each of two warpgroups computes 64 of a chunk's 128 tokens. The first one also starts
the copies, one head ahead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import pl, plgpu
from pallas_kernels.wgmma import ACC, ROWS

HALF = jnp.bfloat16
THREAD = "warpgroup"
# exp() by the instruction that is right to 2^-22: operands have 8 bits.
PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    approx_math=True,
    reduction_scratch_bytes=0,
)

ds = pl.ds


def tile(rows: int, columns: int, slots: int | None = None) -> Any:
    """Shared memory for a bfloat16 tile, or for `slots` of them."""
    shape = (rows, columns) if slots is None else (slots, rows, columns)
    return mosaic.smem(shape, HALF)


def narrow_tile(rows: int, columns: int, slots: int | None = None) -> Any:
    """The same with a swizzle of 64 bytes, to be cut at 32 columns."""
    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64)
    shape = (rows, columns) if slots is None else (slots, rows, columns)
    return plgpu.SMEM(shape, HALF, transforms=transforms)


def wide_tile(rows: int, columns: int) -> Any:
    """A float32 tile, to be cut at 32 columns."""
    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((rows, columns), jnp.float32, transforms=transforms)


def fetch(source: Any, destination: Any, barrier: Any) -> None:
    """Begin a copy into shared memory that the caller knows to be in bounds."""
    plgpu.copy_gmem_to_smem(
        source, destination, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    )


def stage(staged: Any, value: jax.Array) -> None:
    """Put a tile into shared memory for copies and products, once the last copy out of
    there has read it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged[...] = value.astype(HALF)
    plgpu.commit_smem()


def put(destination: Any, value: jax.Array, staged: Any) -> None:
    """Begin to write a tile out through `staged`."""
    stage(staged, value)
    plgpu.copy_smem_to_gmem(staged, destination)


def for_each(
    count: int,
    start: Callable,
    body: Callable,
    full: Any,
    free: Any,
    carry: Any = None,
    *,
    leads: Any = None,
) -> Any:
    """Fold `body(step, slot, carry)` over steps whose copies are begun ahead of it.

    Args:
        count: of steps.
        start: (step, slot), begins the copies of a step; run by the first warpgroup.
        body: (step, slot, carry) -> carry; run by all.
        full: barriers, one a slot, at which the copies arrive.
        free: barriers, one a slot, at which warpgroups arrive when they have read it.
        carry: the first.
        leads: whether this is the first warpgroup, where that is known.
    """
    first = lax.axis_index(THREAD) == 0 if leads is None else leads
    slots = full.shape[0]

    @pl.when(first)
    def _():
        for step in range(min(slots - 1, count)):
            start(step, step)

    def fetch_ahead(step, ahead):
        place = lax.rem(ahead, slots)

        @pl.when(step >= 1)
        def _():
            plgpu.barrier_wait(free.at[place])

        start(ahead, place)

    def one(step, carry):
        slot, ahead = lax.rem(step, slots), step + slots - 1
        if leads is not False:
            pl.when(first & (ahead < count))(lambda: fetch_ahead(step, ahead))
        plgpu.barrier_wait(full.at[slot])
        carry = body(step, slot, carry)
        # Reads by the warps come before the next copy, which takes another path.
        plgpu.commit_smem()
        plgpu.barrier_arrive(free.at[slot])
        return carry

    carry = lax.fori_loop(0, count, one, carry)

    @pl.when(first)
    def _():
        # Every completion of a barrier has to be seen before it goes.
        for step in range(max(count - slots, 0), count):
            plgpu.barrier_wait(free.at[step % slots])

    return carry


def meet(barrier: Any) -> None:
    """Wait for all warpgroups of the block, and for what they read and wrote."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def down(vector: Any, columns: int) -> jax.Array:
    """vector[i] at (i, j)."""
    return _spread(vector, (vector.shape[0], columns), 0)


def across(vector: Any, rows: int) -> jax.Array:
    """vector[j] at (i, j)."""
    return _spread(vector, (rows, vector.shape[0]), 1)


def _spread(ref, shape, axis):
    value = plgpu.load(ref, layout=ACC.reduce(1 - axis), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, (axis,)), ACC)


def load(ref: Any) -> jax.Array:
    """A bfloat16 tile as float32, where a result would lie."""
    return plgpu.load(ref, layout=ACC).astype(jnp.float32)


def pieces(columns: int, most: int = ROWS) -> list[Any]:
    """Slices of `most` columns; of an operand of a product 64, which the swizzle ties
    together."""
    return [ds(at, most) for at in range(0, columns, most)]


def scale_rows(factor: jax.Array, values: jax.Array) -> jax.Array:
    """factor · values; zero where the factor is, also if the value has overflowed."""
    return jnp.where(factor > 0, factor * values, 0.0)


def later(order: Any, end: Any, own: Any, readers: Any) -> jax.Array:
    """(j, i): i >= j, and i no later than end_j of j's document."""
    shape = own.size, readers.size
    reader, token = across(order.at[readers], shape[0]), down(order.at[own], shape[1])
    return (reader >= token) & same(order, end, own, readers)


def same(order: Any, end: Any, own: Any, readers: Any) -> jax.Array:
    """(j, i): i no later than end_j of j's document."""
    reader = across(order.at[readers], own.size)
    return reader <= down(end.at[own], readers.size)


def pair_decay(coarse: Any, fine: Any, own: Any, readers: Any) -> jax.Array:
    """exp(l_i - l_j) at (j, i), at most 1; meaningless for j > i and between
    documents."""
    shape = own.size, readers.size
    between = (
        across(coarse.at[readers], shape[0]) - down(coarse.at[own], shape[1])
    ) + (across(fine.at[readers], shape[0]) - down(fine.at[own], shape[1]))
    return jnp.exp(jnp.minimum(between, 0.0))
