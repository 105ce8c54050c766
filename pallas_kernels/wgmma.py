"""Products by whole warpgroups, sm_90a: operands in shared memory, sums in registers.

The right operand of `wgmma` is a tile of shared memory with a swizzle of 128 bytes, or
its transposed view; the left one is a tile of its own rows, or bfloat16 in registers as
they lie in a result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend
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

    if backend.platform() == "cpu":
        return _interpreted(a, b, acc)
    if acc is None:
        acc = zeros((a.shape[0], b.shape[1]))

    def onto(out):
        plgpu.wgmma(out, a, b)

    return pl.run_state(onto)(plgpu.ACC.init(acc))


def _interpreted(a, b, acc):
    """The same where JAX interprets: it knows neither a first sum nor a left operand
    in registers."""
    if isinstance(a, jax.Array):
        dims = (((1,), (0,)), ((), ()))
        product = lax.dot_general(
            a, plgpu.load(b), dims, preferred_element_type=jnp.float32
        )
    else:

        def one(out):
            plgpu.wgmma(out, a, b)
            return out[...]

        product = pl.run_scoped(one, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
    return product if acc is None else acc + product


def zeros(shape: tuple[int, int]) -> jax.Array:
    """A sum to begin with."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACC)
