"""Products by whole warpgroups, sm_90a: operands in shared memory, sums in registers.

The right operand of `wgmma` is a tile of shared memory with a swizzle of 128 bytes, or
its transposed view; the left one is a tile of its own rows, or bfloat16 in registers as
they lie in a result.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend, interpreter
from pallas_kernels.mosaic import pl, plgpu

# Rows of a result that one warpgroup computes.
ROWS = 64
# A result, and a left operand in registers.
ACC = plgpu.Layout.WGMMA


def dot(a: Any, b: Any, acc: jax.Array | None = None) -> jax.Array:
    """a @ b in float32, or acc + a @ b; waits for the result.

    Args:
        a: (M, K) bfloat16 tile in shared memory, or an array in the layout `ACC`.
        b: (K, N) bfloat16 tile in shared memory.
        acc: (M, N) float32.
    """

    if backend.platform() == "cpu":  # the interpreter cannot begin with a sum
        product = _interpreted(a, b)
        return product if acc is None else acc + product
    if acc is None:
        acc = zeros((a.shape[0], b.shape[1]))

    def onto(out):
        plgpu.wgmma(out, a, b)

    return pl.run_state(onto)(plgpu.ACC.init(acc))


def _interpreted(a, b):
    def product(out):
        plgpu.wgmma(out, a, b)
        return out[...]

    shape = a.shape[0], b.shape[1]
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def zeros(shape: tuple[int, int]) -> jax.Array:
    """A sum to begin with."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACC)


__all__ = ["ACC", "ROWS", "dot", "interpreter", "zeros"]
