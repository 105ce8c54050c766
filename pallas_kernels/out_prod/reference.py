"""The product in plain JAX: XLA transposes and decodes within the product."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.out_prod.planes import unpack_planes


def out_prod(a, b, scale, tail, *, transpose_a, transpose_b):
    """(M, N) in a.dtype; differentiable by JAX in all but codes."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    k = a.shape[0 if transpose_a else 1]
    b = decode(b, k, a.dtype)
    sums = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))
    total = lax.dot_general(a, b, sums, preferred_element_type=wide)
    if scale is not None:
        total = total * scale.astype(wide)
    if tail is not None:
        u, v = tail
        over_rank = (((1,), (1,)), ((), ()))
        total = total + lax.dot_general(u, v, over_rank, preferred_element_type=wide)
    return total.astype(a.dtype)


def decode(b: jax.Array, k: int, dtype: jnp.dtype) -> jax.Array:
    """The right operand as numbers of dtype, whichever way it is stored."""
    return (unpack_planes(b, k) if b.dtype == jnp.uint8 else b).astype(dtype)
