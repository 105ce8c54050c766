"""Ternary codes at 2 bits, laid out so that a kernel decodes a tile without shuffling.

A row of K codes is cut into four stretches of C columns. Byte c of the row holds code
c of each stretch, as code + 1, the first stretch in the low bits: a tile of bytes is a
tile of codes of any one stretch, shifted.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.out_prod.shapes import PLANES

# A whole number of tiles, whatever their width.
COLUMNS = 64


def pack_planes(codes: jax.Array) -> jax.Array:
    """Pack (N, K) codes in {-1, 0, 1}, of any dtype, to (N, C) uint8.

    C is K / 4, rounded up to a multiple of 64; what is beyond K holds code 0.
    """
    n, k = codes.shape
    columns = -(-k // (PLANES * COLUMNS)) * COLUMNS
    raised = codes.astype(jnp.int32) + 1
    widths = ((0, 0), (0, PLANES * columns - k))
    stretches = jnp.pad(raised, widths, constant_values=1).reshape(n, PLANES, columns)
    return jnp.sum(stretches << _shifts(), axis=1).astype(jnp.uint8)


def unpack_planes(packed: jax.Array, k: int) -> jax.Array:
    """(N, k) int8 codes of (N, C) uint8."""
    raised = (packed[:, None].astype(jnp.int32) >> _shifts()) & 3
    return (raised.reshape(packed.shape[0], -1)[:, :k] - 1).astype(jnp.int8)


def _shifts() -> jax.Array:
    return 2 * jnp.arange(PLANES, dtype=jnp.int32)[:, None]
