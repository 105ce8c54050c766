"""Operands, and the product and its gradients in float64, for the tests of out_prod."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import out_prod, pack_planes

# Largest error over largest value. bfloat16 rounds a result by 2^-9 = 2e-3 of itself;
# a bf16 sum of a few of them, as with a left-over of K, by twice that.
BFLOAT16 = 4e-3
FLOAT32 = 2e-6


def operands(m, k, n, *, flags="", rank=0, codes=None, seed=0):
    """(a, b, scale, tail, dy) as float64 and integers; values are bfloat16's own."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return np.float64(jnp.asarray(rng.normal(size=shape), jnp.bfloat16))

    a = normal(k, m) if "a" in flags else normal(m, k)
    shape = (n, k) if "b" in flags else (k, n)
    b = normal(*shape) if codes is None else rng.integers(-1, 2, size=shape)
    tail = (normal(m, rank), normal(n, rank)) if rank else None
    return a, b, np.float32(0.37), tail, normal(m, n)


def stored(b, codes):
    """The right operand as an operator takes it: numbers as they are."""
    if codes is None:
        return b
    codes_int8 = jnp.asarray(b, jnp.int8)
    return codes_int8 if codes == "int8" else pack_planes(codes_int8)


def with_gradients(case, *, flags, codes, dtype, implementation):
    """(y, da, db, dscale, dtail) of the operator, float64 arrays; db None for codes."""
    a, b, scale, tail, dy = case

    def cast(t):
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), t)

    frozen = stored(b, codes) if codes else None

    def product(a, b, scale, tail):
        return out_prod(
            a,
            frozen if codes else b,
            transpose_a="a" in flags,
            transpose_b="b" in flags,
            scale=scale,
            tail=tail,
            implementation=implementation,
        )

    def run(a, b, scale, tail, dy):
        y, pull = jax.vjp(product, a, b, scale, tail)
        return y, *pull(dy)

    arrays = (cast(a), None if codes else cast(b), scale, cast(tail), cast(dy))
    return jax.tree.map(np.float64, jax.jit(run)(*arrays))


def truth(case, flags):
    """The same by NumPy in float64; db also for codes."""
    a, b, scale, tail, dy = case
    left, right = (a.T if "a" in flags else a), (b.T if "b" in flags else b)
    scale = np.float64(scale)
    y = left @ right * scale + (tail[0] @ tail[1].T if tail else 0)
    da, db = dy @ right.T * scale, left.T @ dy * scale
    dscale = np.sum(left @ right * dy)
    dtail = (dy @ tail[1], dy.T @ tail[0]) if tail else None
    return y, da.T if "a" in flags else da, db.T if "b" in flags else db, dscale, dtail


def assert_close(got, expected, tolerance):
    """Every array that is there: the same shape, largest error over largest value."""
    for x, y in zip(got, expected, strict=True):
        if x is None:
            continue
        if isinstance(x, tuple):
            assert_close(x, y, tolerance)
            continue
        assert x.shape == np.shape(y)
        error = np.abs(x - y).max() / np.abs(y).max()
        assert error <= tolerance, error
