"""Weights and gradients of matrices kept in bfloat16: half of the memory, at a price.

What it costs in loss, and saves in memory: README.md beside this file.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bitmamba.types import Params

DTYPES = ("float32", "bfloat16")
_LARGEST = 0x7F7F0000  # bits of bfloat16's largest number as float32


def kept_gradients(grads: Params, *, dtype: str) -> Params:
    """Gradients of matrices in `dtype`, all others in float32.

    Vectors (norms, biases, state parameters) and convolutions take no memory to speak
    of, and are the parameters that rounding hurts most.
    """

    def keep(g):
        return g.astype(jnp.dtype(dtype) if g.ndim == 2 else jnp.float32)

    return jax.tree.map(keep, grads)


def add_rounded(params: Params, updates: Params, *, key: jax.Array) -> Params:
    """params + updates; bfloat16 leaves are rounded stochastically.

    Args:
        params: float32 or bfloat16 leaves.
        updates: same paths and shapes, float32.
        key: typed; another one for each step. The result depends on nothing else.

    Returns:
        Leaves of the dtypes of `params`.

    Numerics: sums in float32. Each bfloat16 leaf has numbers of its own.
    """
    leaves, treedef = jax.tree.flatten(params)

    def add(i, p, u):
        total = p.astype(jnp.float32) + u
        if p.dtype == jnp.bfloat16:
            return stochastic_round(total, key=jax.random.fold_in(key, i))
        return total.astype(p.dtype)

    pairs = zip(leaves, treedef.flatten_up_to(updates), strict=True)
    return treedef.unflatten([add(i, p, u) for i, (p, u) in enumerate(pairs)])


def stochastic_round(x: jax.Array, *, key: jax.Array) -> jax.Array:
    """Round to one of the two bfloat16 neighbours, so that the mean is x.

    Up (away from zero) with probability (|x| - below) / (above - below), which is a
    whole number of 2^-16.

    Args:
        x: any shape, float32.
        key: typed; equal keys give equal roundings, whatever the sharding.

    Returns:
        bfloat16 of the same shape.

    Numerics: exact for what bfloat16 holds. Finite stays finite: beyond the largest
        bfloat16, 3.39e38, everything becomes that. Infinities and NaN stay.
    Source: Gupta et al. 2015, arXiv:1502.02551, section 3. The random numbers are a
        hash of place and key, not Threefry: XLA computes them in the same pass as the
        sum, where Threefry's would be arrays several times as large as x.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, size = bits & jnp.uint32(0x80000000), bits & jnp.uint32(0x7FFFFFFF)
    size = (size + (_noise(x.shape, key) >> 16)) & jnp.uint32(0xFFFF0000)
    size = jnp.minimum(size, jnp.uint32(_LARGEST))
    rounded = jax.lax.bitcast_convert_type(sign | size, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _noise(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Uniform uint32 of a shape: the place, hashed with both words of the key."""
    first, second = jax.random.key_data(key)[:2]
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(
            jnp.uint32, shape, axis
        )
    return _mixed(_mixed(place ^ first) + second)


def _mixed(x: Any) -> jax.Array:
    """A bijection of 32 bits, each output bit depending on all input bits.

    Source: Wellons 2018, "Prospecting for hash functions", the constants of lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
