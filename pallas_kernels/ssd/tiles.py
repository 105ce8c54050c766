"""Tiles of the scan inside a kernel: how they come, how they are multiplied.

An operand is a tuple of bfloat16 parts whose sum is the value: one part for bfloat16
inputs; two (16 of 24 bits) for float32, since the portable `mma` has no float32 form.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import is_hopper, mgpu, pl, plgpu, store_tile, transforms
from pallas_kernels import backend

HALF = jnp.bfloat16
ACC = plgpu.Layout.MMA_ACC(HALF)
LHS = plgpu.Layout.MMA_LHS(HALF)
RHS = plgpu.Layout.MMA_RHS(HALF)

Parts = tuple[jax.Array, ...]


def scratch(parts: int, rows: int, columns: int) -> Any:
    """Shared memory for one operand, (parts, rows, columns)."""
    shape = (rows, columns)
    return plgpu.SMEM((parts, *shape), HALF, transforms=transforms(shape, HALF))


class Copies:
    """Asynchronous copies into shared memory: by TMA and barrier, or by cp.async."""

    def __init__(self, barrier: Any):
        self.barrier = barrier

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


def dot(acc: jax.Array, a: Parts | Shared, b: Parts | Shared, *, step=64) -> jax.Array:
    """acc + a @ b; of two parts each, all products but that of the small ones.

    What lies in shared memory is loaded piece by piece, to spare registers.
    """
    (rows, depth), columns = acc.shape[:1] + _shape(a)[1:], acc.shape[1]
    most = max(_count(a), _count(b))
    for start in range(0, depth, step):
        inner = pl.ds(start, min(step, depth - start))
        for j in range(_count(b)):
            right = _part(b, j, RHS, (inner, pl.ds(0, columns)))
            for i in range(min(_count(a), most - j)):
                left = _part(a, i, LHS, (pl.ds(0, rows), inner))
                acc = plgpu.mma(acc, left, right)
    return acc


def _shape(operand):
    return operand.shape if isinstance(operand, Shared) else operand[0].shape


def _count(operand):
    return operand.ref.shape[0] if isinstance(operand, Shared) else len(operand)


def _part(operand, index, layout, block):
    if isinstance(operand, Shared):
        return operand.load(index, layout, block)
    (row, rows), (column, columns) = ((d.start, d.size) for d in block)
    return operand[index][row : row + rows, column : column + columns]


def load(ref: Any, layout: Any, *, transpose: bool = False) -> jax.Array:
    """The value of an operand (parts, M, N) in shared memory, float32."""
    tile = Shared(ref, transpose)
    return join(tuple(tile.load(part, layout) for part in range(ref.shape[0])))


def save(ref: Any, parts: Parts) -> None:
    """Put an operand into shared memory for the whole warpgroup to read."""
    for index, part in enumerate(parts):
        ref.at[index][...] = part


def store(destination: Any, value: jax.Array, scratch_s: Any) -> None:
    """Write a result out in the destination's dtype; scratch_s may be overwritten."""
    if destination.dtype == HALF:
        scratch_s.at[0][...] = value.astype(HALF)
        store_tile(destination, scratch_s.at[0])
    else:
        destination[...] = value


def halves(columns: int) -> list[Any]:
    """Slices of at most 64 columns: what is worked on at once, to spare registers."""
    return [pl.ds(at, min(64, columns - at)) for at in range(0, columns, 64)]


def at_or_after(size: int) -> Parts:
    """The left operand of ones at (k, i), i >= k: sums over what follows."""
    after = index((size, size), 1, LHS) >= index((size, size), 0, LHS)
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


def index(shape: tuple[int, int], axis: int, layout: Any = ACC) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def as_lhs(parts: Parts) -> Parts:
    """Results of `mma` as the left operand of the next: each thread has them already."""
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
    size = rows_s.shape[1]
    product = dot(zeros((size, size)), Shared(rows_s), Shared(columns_s, True))
    return jnp.where(mask, product, 0.0)


def earlier(start: Any, size: int, *, strict: bool = False) -> jax.Array:
    """(i, j): j <= i (or j < i), and j no earlier than start_i of i's document."""
    shape = (size, size)
    i, j = index(shape, 0), index(shape, 1)
    before = j < i if strict else j <= i
    return before & (j >= down(start, shape))


def later(end: Any, size: int) -> jax.Array:
    """(j, i): i >= j, and i no later than end_j of j's document."""
    shape = (size, size)
    j, i = index(shape, 0), index(shape, 1)
    return (i >= j) & (i <= down(end, shape))


def pair_decay(coarse: Any, fine: Any, *, transpose: bool = False) -> jax.Array:
    """exp(l_i - l_j), at most 1; meaningless for j > i and between documents.

    At (i, j), or transposed at (j, i).
    """
    shape = (coarse.shape[0],) * 2
    one, other = (across, down) if transpose else (down, across)
    between = (one(coarse, shape) - other(coarse, shape)) + (
        one(fine, shape) - other(fine, shape)
    )
    return jnp.exp(jnp.minimum(between, 0.0))


def scale_rows(factor: jax.Array, values: jax.Array) -> jax.Array:
    """factor · values; zero where the factor is, also if the value has overflowed."""
    return jnp.where(factor > 0, factor * values, 0.0)
