"""The product with its gradient: products of the same kind, nothing transposed."""

import functools

import jax
import jax.numpy as jnp
from jax.dtypes import float0

from pallas_kernels.out_prod import launch, reference


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def out_prod(a, b, scale, tail, transpose_a, transpose_b, use_kernel):
    """(M, N) in a.dtype; see `api`."""
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if use_kernel and launch.refusal(a, b, **options) is None:
        return launch.run(a, b, scale, tail, **options)
    return reference.out_prod(a, b, scale, tail, **options)


def _forward(a, b, scale, tail, transpose_a, transpose_b, use_kernel):
    y = out_prod(a, b, scale, tail, transpose_a, transpose_b, use_kernel)
    return y, (a, b, scale, tail)


def _backward(transpose_a, transpose_b, use_kernel, saved, dy):
    a, b, scale, tail = saved

    def product(left, right, left_transposed, right_transposed):
        return out_prod(
            left, right, scale, None, left_transposed, right_transposed, use_kernel
        )

    if transpose_a:
        k = a.shape[0]
        numbers = reference.decode(b, k, a.dtype)
        da = product(numbers, dy, transpose_b, True)
    else:
        da = _product_with_codes(product, dy, b, a.shape[1], not transpose_b)
    if b.dtype != a.dtype:
        db = jax.numpy.zeros(b.shape, float0)
    elif transpose_b:
        db = product(dy, a, True, transpose_a)
    else:
        db = product(a, dy, not transpose_a, False)
    dscale = _scale_gradient(a, b, scale, dy, transpose_a, transpose_b)
    return da, db, dscale, _tail_gradient(tail, dy)


out_prod.defvjp(_forward, _backward)


def _product_with_codes(product, dy, b, k, b_transposed):
    """dy @ op(b)ᵀ. Planes know their K only from the left operand: unpacked here."""
    if b.dtype == jnp.uint8:
        b = reference.decode(b, k, jnp.int8)
    return product(dy, b, False, b_transposed)


def _scale_gradient(a, b, scale, dy, transpose_a, transpose_b):
    """The sum of dy · (op(a) @ op(b)); XLA drops it where nothing asks for it."""
    if scale is None:
        return None
    wide = jnp.promote_types(a.dtype, jnp.float32)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    unscaled = reference.out_prod(a.astype(wide), _wide(b, wide), None, None, **options)
    return jnp.vdot(unscaled, dy.astype(wide)).reshape(scale.shape).astype(scale.dtype)


def _wide(b, wide):
    return b.astype(wide) if jnp.issubdtype(b.dtype, jnp.floating) else b


def _tail_gradient(tail, dy):
    if tail is None:
        return None
    u, v = tail
    wide = jnp.promote_types(dy.dtype, jnp.float32)
    du = jnp.dot(dy, v, preferred_element_type=wide)
    dv = jnp.einsum("mn,mr->nr", dy, u, preferred_element_type=wide)
    return du.astype(u.dtype), dv.astype(v.dtype)
