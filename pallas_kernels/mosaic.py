"""Mosaic GPU as the kernels use it: the names that move, and how a kernel runs.

Imported by kernel files only, and only where `compat.HAS_MOSAIC_GPU`. A kernel runs on
the device that is JAX's default while it is traced: a real GPU, an absent one that is
only compiled for (scripts/gpu_compile_check.py), or a CPU, which interprets it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax._src import callback, effects
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
# For kernels that never read what they write: no barrier at each store.
WRITES_ONLY = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def kernel(body: Callable, **options: Any) -> Callable:
    """`plgpu.kernel`, interpreted where the default device is a CPU.

    Interpreting simulates memories, copies and barriers of a Hopper GPU in Python: for
    checking only. Outputs and scratch start as NaN.
    """
    interpret = plgpu.InterpretGPUParams() if backend.platform() == "cpu" else None
    return plgpu.kernel(body, interpret=interpret, **options)


def is_hopper() -> bool:
    """Whether tiles come by TMA (and a barrier): sm_90 and later, and interpreted."""
    return (backend.capability() or (9, 0)) >= (9, 0)


@contextlib.contextmanager
def races_raise() -> Iterator[None]:
    """Interpret the kernels traced and run inside; raise where two accesses race.

    Raises:
        RuntimeError: a kernel touched memory without having waited for it; or no kernel
            ran at all.
    """
    params = plgpu.InterpretGPUParams(detect_races=True)
    make_state, states = gpu_callbacks.GPURaceDetectionState, []

    def kept(**sizes: int) -> Any:
        states.append(make_state(**sizes))
        return states[-1]

    # JAX keeps the findings of the last kernel only. What a kernel that failed has
    # left behind is removed, before and after.
    gpu_callbacks.GPURaceDetectionState = kept
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
            jax.effects_barrier()
    finally:
        gpu_callbacks.GPURaceDetectionState = make_state
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if not states:
        raise RuntimeError("no kernel was interpreted; expected at least one")
    if any(state.races_found for state in states):
        raise RuntimeError("a kernel has a data race; it is described on stdout")


def transposed(ref: Any) -> Any:
    """The transposed view of a reference: no data move."""
    return ref.transpose((1, 0))


def transforms(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """Tiling and swizzle of a tile in shared memory, as the tensor cores read it."""
    bits = jax.numpy.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tile = (8, 8 * swizzle // bits)
    return plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)


def smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Scratch of one tile in shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape, dtype))


def tile_spec(shape: tuple[int, ...], dtype: Any, index_map: Callable) -> Any:
    """Block of a pipelined input whose array is a whole number of blocks."""
    return plgpu.BlockSpec(
        shape,
        index_map,
        transforms=transforms(shape, dtype),
        oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )


def store_tile(destination: Any, tile: Any) -> None:
    """Copy a tile of shared memory out, in rows long enough for the memory bus.

    Results of `mma` lie in registers in pieces too small to be stored directly.
    """
    swizzle = plgpu.find_swizzle(tile.shape[-1] * tile.dtype.itemsize * 8)
    layout = plgpu.Layout.SMEM_GMEM_COPY(tile.shape, tile.dtype, swizzle=swizzle)
    value = plgpu.layout_cast(tile[...], layout)
    if hasattr(plgpu, "store"):  # JAX 0.12; an assignment there wants a fast layout
        plgpu.store(destination, value, optimized=False)
    else:
        destination[...] = value


@plgpu.inline_mgpu()
def _warpgroup_barrier(_ctx: Any) -> None:
    mgpu.warpgroup_barrier()


def smem_written() -> None:
    """Wait until what the warpgroup wrote to shared memory can be read by all of it."""
    if is_hopper():
        plgpu.commit_smem()
    else:
        # commit_smem emits fence.proxy.async, which aborts LLVM before sm_90.
        _warpgroup_barrier()


def meet() -> None:
    """Wait for the whole warpgroup, whose writes to shared memory can then be read.

    Where TMA has no part in it: `smem_written` orders that too, and on Hopper so waits
    for every load that is under way.
    """
    if backend.platform() != "cpu":  # to the interpreter a warpgroup is one thread
        _warpgroup_barrier()


def smem_read() -> None:
    """Say that tiles of a pipeline have been read, before new ones replace them.

    TMA writes by another path than the warps read by: a fence has to order the two.
    Before Hopper each copy waits for all warps itself.
    """
    if is_hopper():
        plgpu.commit_smem()


def _mma_interpreted(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    dims = (((1,), (0,)), ((), ()))
    return acc + lax.dot_general(a, b, dims, preferred_element_type=acc.dtype)


# JAX interprets wgmma but has no rule for mma on a CPU.
mlir.register_lowering(
    primitives.mma_p,
    mlir.lower_fun(_mma_interpreted, multiple_results=False),
    platform="cpu",
)

# The interpreter orders its callbacks by an effect that JAX does not let through
# jax.checkpoint and custom derivatives. It only orders: to compute a kernel again, or
# not at all, is harmless.
for _allowed in (
    effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):
    _allowed.add_type(callback.OrderedIOEffect)

__all__ = [
    "LANE",
    "WRITES_ONLY",
    "is_hopper",
    "kernel",
    "meet",
    "mgpu",
    "pl",
    "plgpu",
    "races_raise",
    "smem",
    "smem_read",
    "smem_written",
    "store_tile",
    "tile_spec",
    "transforms",
    "transposed",
]
