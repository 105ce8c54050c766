"""Products by wgmma, for sm_90 alone: what one block of three warpgroups computes.

One warpgroup copies tiles by TMA into a ring of stages. Two multiply, each half of the
rows of a tile of the result, and write it out while the ring fills for the next tile.
wgmma reads both operands from shared memory in either order, so nothing is transposed
in memory. Two blocks below each other each copy half of a tile of the right operand, to
both. TMA reads zeros beyond an array's end and drops what is written there, so no size
need be a multiple of a tile's; `alignment` says of what else.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpreter, mosaic
from pallas_kernels.matmul_hopper_product import (
    CONSUMERS,
    TOGETHER,
    Operand,
    Product,
    Refs,
    each_tile,
    scratch,
)
from pallas_kernels.matmul_hopper_sums import consume
from pallas_kernels.mosaic import pl, plgpu

# Of each thread of the warpgroup that copies.
REGISTERS = 40


def call(
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array | None,
    tail: tuple[jax.Array, jax.Array] | None,
    *,
    product: Product,
    name: str,
) -> jax.Array:
    """op(a) @ op(b) · scale + op(u) @ op(v) for tail = (u, v).

    Args:
        a, b: as the product's sides say.
        scale: float32, (1,), or for each row of the result, (product.rows,); or None.
        tail: u stored as a is, v as b is; in the dtype of b.
        product: sizes and tiles.
        name: of the kernel.

    Returns:
        product.out_shape of product.dtype; what is beyond the result is zero.
    """
    p = product
    given = (a, b, scale, *(tail or (None, None)))
    kinds = [*given, "out", *scratch(p)]

    def body(*refs):
        left = iter(refs)
        refs = Refs(*(None if kind is None else next(left) for kind in kinds))
        warpgroup = lax.axis_index("warpgroup")
        lax.cond(
            warpgroup < CONSUMERS,
            lambda: consume(p, refs, warpgroup),
            lambda: _produce(p, refs),
        )

    body.__name__ = name
    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(p.out_shape, p.dtype),
        grid=(p.blocks,),
        grid_names=("block",),
        cluster=(p.together,),
        cluster_names=(TOGETHER,),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[kind for kind in scratch(p) if kind is not None],
        compiler_params=mosaic.LANE,
    )(*(t for t in given if t is not None))


def _produce(p: Product, refs: Refs) -> None:
    """Fill the ring, tile after tile."""
    plgpu.set_max_registers(REGISTERS, action="decrease")

    def freed(count):
        plgpu.barrier_wait(refs.freed.at[lax.rem(count, p.stages)])

    def copy(ref, side, place, step, target, barrier, **options):
        rows = pl.ds(place * side.tile, side.tile)
        depth = pl.ds(step * p.tiles.k, p.tiles.k)
        part = ref.at[rows, depth] if side.sum_axis == 1 else ref.at[depth, rows]
        plgpu.copy_gmem_to_smem(part, target, barrier, **options)

    shared = {"collective_axes": TOGETHER} if p.together > 1 else {}

    def tile(i, j, _, count):
        def fill(step, count, *, tail=False):
            slot = lax.rem(count, p.stages)
            pl.when(count >= p.stages)(lambda: freed(count))
            filled = refs.filled.at[slot]
            a_tile, a_step = refs.a_ring.at[slot], step
            if tail and p.decodes:
                a_tile = refs.u_tiles.at[step]
            elif p.per_plane:
                a_step = lax.rem(step, p.per_plane)
            a, b = (refs.u, refs.v) if tail else (refs.a, refs.b)
            copy(a, p.left, i, a_step, a_tile, filled)
            copy(b, p.right, j, step, refs.b_ring.at[slot], filled, **shared)
            return count + 1

        count = lax.fori_loop(0, p.steps, fill, count)
        fill_tail = functools.partial(fill, tail=True)
        if p.tail_steps:
            count = lax.fori_loop(0, p.tail_steps, fill_tail, count)
        return count

    count = each_tile(p, tile)
    # Every completion of a barrier has to be seen before it goes.
    last = jnp.maximum(count - p.stages, 0)
    lax.fori_loop(last, count, lambda c, _: freed(c), None)


__all__ = ["Operand", "Product", "call", "interpreter"]
