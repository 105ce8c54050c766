"""Tiles of the scan inside a kernel: how they come, how they are multiplied.

An operand is a tuple of bfloat16 parts whose sum is the value: one part for bfloat16
inputs; two (16 of 24 bits) for float32, since the portable `mma` has no float32 form.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
from pallas_kernels.mosaic import is_hopper, mgpu, pl, plgpu

HALF = jnp.bfloat16
# Bytes; 128 would tie columns together in 64s, and every pattern of addresses that the
# compiler keeps through a loop costs registers.
_SWIZZLE = 64
# Rows or columns of a right operand in registers at once.
_PIECE = 32
ACC = plgpu.Layout.MMA_ACC(HALF)
LHS = plgpu.Layout.MMA_LHS(HALF)
RHS = plgpu.Layout.MMA_RHS(HALF)

Parts = tuple[jax.Array, ...]


def scratch(parts: int, rows: int, columns: int, slots: int | None = None) -> Any:
    """Shared memory for one operand, (parts, rows, columns), or for `slots` of them."""
    shape = (rows, columns)
    whole = (parts, *shape) if slots is None else (slots, parts, *shape)
    return plgpu.SMEM(whole, HALF, transforms=transforms(shape))


def transforms(shape: tuple[int, int]) -> tuple[Any, ...]:
    """Tiling and swizzle of a bfloat16 tile."""
    swizzle = min(_SWIZZLE, plgpu.find_swizzle(shape[1] * 16))
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def copy_out(destination: Any, tile: Any) -> None:
    """Copy a bfloat16 tile of shared memory out, in rows long enough for the bus."""
    swizzle = min(_SWIZZLE, plgpu.find_swizzle(tile.shape[1] * 16))
    layout = plgpu.Layout.SMEM_GMEM_COPY(tile.shape, HALF, swizzle=swizzle)
    destination[...] = plgpu.layout_cast(tile[...], layout)


class Copies:
    """Asynchronous copies into shared memory: by TMA and barrier, or by cp.async."""

    def __init__(self, barrier: Any):
        self.barrier = barrier

    @classmethod
    def of(cls, barriers: Any, slot: Any) -> "Copies":
        """Those into one slot of several."""
        return cls(None if barriers is None else barriers.at[slot])

    def start(self, source: Any, destination: Any) -> None:
        """Begin one copy; the caller knows it is in bounds."""
        plgpu.copy_gmem_to_smem(
            source,
            destination,
            self.barrier,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def wait(self, in_flight: int = 0) -> None:
        """Until at most `in_flight` of the copies begun (before sm_90) are under way.

        On Hopper the barrier itself counts its copies.
        """
        if self.barrier is None:
            plgpu.wait_gmem_to_smem(in_flight)
        else:
            plgpu.barrier_wait(self.barrier)


def barrier(copies_each: int, slots: int = 1, *, name: str = "bar") -> dict[str, Any]:
    """Scratch entry for a barrier where the machine has them."""
    if not is_hopper():
        return {}
    return {name: plgpu.Barrier(num_arrivals=copies_each, num_barriers=slots)}


def zeros(shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACC)


def split(value: jax.Array, parts: int) -> Parts:
    """float32 as the sum of `parts` bfloat16 arrays."""
    high = value.astype(HALF)
    if parts == 1:
        return (high,)
    return high, (value - high.astype(jnp.float32)).astype(HALF)


def join(parts: Parts) -> jax.Array:
    """The float32 sum of the parts."""
    high, *low = (part.astype(jnp.float32) for part in parts)
    return high + low[0] if low else high


class Shared(NamedTuple):
    """An operand (parts, M, N) in shared memory, or its transposed view."""

    ref: Any
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.ref.shape[1:]
        return (columns, rows) if self.transpose else (rows, columns)

    def load(self, part: int, layout: Any, block: Any = None) -> jax.Array:
        """One part, in registers; of it (rows, columns) if a block is named."""
        tile = self.ref.at[part]
        if block is not None:
            tile = tile.at[block[::-1] if self.transpose else block]
        tile = tile.transpose((1, 0)) if self.transpose else tile
        return plgpu.load(tile, layout=layout, optimized=False)


def dot(acc: jax.Array, a: Parts | Shared, b: Parts | Shared) -> jax.Array:
    """acc + a @ b; of two parts each, all products but that of the small ones.

    What lies in shared memory is loaded piece by piece, to spare registers.
    """
    if isinstance(b, Shared) and b.transpose:
        return side_by_side(
            _dot(acc[:, n.start : n.start + n.size], a, b, n, step=64 // _count(b))
            for n in pieces(acc.shape[1], _PIECE)
        )
    return _dot(acc, a, b, pl.ds(0, acc.shape[1]), step=_PIECE)


def _dot(acc, a, b, columns, *, step):
    rows = pl.ds(0, acc.shape[0])
    most = max(_count(a), _count(b))
    for inner in pieces(_depth(a), step):
        for j in range(_count(b)):
            right = _part(b, j, RHS, (inner, columns))
            for i in range(min(_count(a), most - j)):
                acc = plgpu.mma(acc, _part(a, i, LHS, (rows, inner)), right)
    return acc


def side_by_side(arrays: Any) -> jax.Array:
    """Arrays of the same rows as one."""
    arrays = list(arrays)
    return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, 1)


def join_columns(operands: Any) -> Parts:
    """Operands of the same rows as one."""
    return tuple(side_by_side(part) for part in zip(*operands, strict=True))


def _depth(operand):
    return operand.shape[1] if isinstance(operand, Shared) else operand[0].shape[1]


def _count(operand):
    return operand.ref.shape[0] if isinstance(operand, Shared) else len(operand)


def _part(operand, index, layout, block):
    if isinstance(operand, Shared):
        return operand.load(index, layout, block)
    (row, rows), (column, columns) = ((d.start, d.size) for d in block)
    return operand[index][row : row + rows, column : column + columns]


def load(ref: Any, layout: Any, *, transpose: bool = False) -> jax.Array:
    """The value of an operand (parts, M, N) in shared memory, float32."""
    return join(parts(ref, layout, transpose=transpose))


def parts(ref: Any, layout: Any, *, transpose: bool = False) -> Parts:
    """An operand (parts, M, N) in registers."""
    tile = Shared(ref, transpose)
    return tuple(tile.load(part, layout) for part in range(ref.shape[0]))


def cut(operand: Parts, columns: Any) -> jax.Array:
    """The value of some columns, float32."""
    end = columns.start + columns.size
    return join(tuple(part[:, columns.start : end] for part in operand))


def save(ref: Any, parts: Parts) -> None:
    """Put an operand into shared memory for the whole warpgroup to read."""
    for index, part in enumerate(parts):
        ref.at[index][...] = part


def store(destination: Any, value: jax.Array, scratch_s: Any) -> None:
    """Write a result out in the destination's dtype; scratch_s may be overwritten."""
    if destination.dtype == HALF:
        scratch_s.at[0][...] = value.astype(HALF)
        copy_out(destination, scratch_s.at[0])
    else:
        destination[...] = value


def pieces(columns: int, most: int = 64) -> list[Any]:
    """Slices of at most `most` columns: what is worked on at once."""
    return [pl.ds(at, min(most, columns - at)) for at in range(0, columns, most)]


def at_or_after(order: Any) -> Parts:
    """The left operand of ones at (k, i), i >= k: what sums over what follows."""
    shape = (order.shape[0],) * 2
    after = across(order, shape, LHS) >= down(order, shape, LHS)
    return (jnp.where(after, 1.0, 0.0).astype(HALF),)


def down(vector: Any, shape: tuple[int, int], layout: Any = ACC) -> jax.Array:
    """vector[i] at (i, j)."""
    return _spread(vector, shape, 0, layout)


def across(vector: Any, shape: tuple[int, int], layout: Any = ACC) -> jax.Array:
    """vector[j] at (i, j)."""
    return _spread(vector, shape, 1, layout)


def _spread(ref, shape, axis, layout):
    value = plgpu.load(ref, layout=layout.reduce(1 - axis), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, (axis,)), layout)


def as_lhs(parts: Parts) -> Parts:
    """Results of `mma` as the left operand of the next: no thread moves anything."""
    if backend.platform() == "cpu":
        return parts
    return tuple(_as_lhs(part.shape)(part) for part in parts)


def _as_lhs(shape):
    out = plgpu.ShapeDtypeStruct(shape, HALF, layout=LHS)

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=out)
    def rename(_ctx, value):
        layout = mgpu.MMALayouts(HALF).lhs
        registers = value.registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=None
        )

    return rename


def scores(rows_s: Any, columns_s: Any, mask: jax.Array) -> jax.Array:
    """rows · columnsᵀ where the mask holds, exact zeros elsewhere."""
    product = dot(zeros(mask.shape), Shared(rows_s), Shared(columns_s, True))
    return jnp.where(mask, product, 0.0)


def earlier(order: Any, start: Any, j: Any, *, strict: bool = False) -> jax.Array:
    """(i, j) for a slice of j: j <= i (or j < i), and j not before i's document."""
    shape = (order.shape[0], j.size)
    reader, read = down(order, shape), across(order.at[j], shape)
    before = read < reader if strict else read <= reader
    return before & (read >= down(start, shape))


def later(order: Any, end: Any, i: Any) -> jax.Array:
    """(j, i) for a slice of i: i >= j, and i no later than end_j of j's document."""
    shape = (order.shape[0], i.size)
    reader = across(order.at[i], shape)
    return (reader >= down(order, shape)) & (reader <= down(end, shape))


def pair_decay(coarse: Any, fine: Any, j: Any) -> jax.Array:
    """exp(l_i - l_j) at (i, j) for a slice of j, at most 1.

    Meaningless for j > i and between documents.
    """
    shape = (coarse.shape[0], j.size)
    between = (down(coarse, shape) - across(coarse.at[j], shape)) + (
        down(fine, shape) - across(fine.at[j], shape)
    )
    return jnp.exp(jnp.minimum(between, 0.0))


def pair_decay_transposed(coarse: Any, fine: Any, i: Any) -> jax.Array:
    """The same at (j, i), for a slice of i."""
    shape = (coarse.shape[0], i.size)
    between = (across(coarse.at[i], shape) - down(coarse, shape)) + (
        across(fine.at[i], shape) - down(fine, shape)
    )
    return jnp.exp(jnp.minimum(between, 0.0))


def scale_rows(factor: jax.Array, values: jax.Array) -> jax.Array:
    """factor · values; zero where the factor is, also if the value has overflowed."""
    return jnp.where(factor > 0, factor * values, 0.0)
