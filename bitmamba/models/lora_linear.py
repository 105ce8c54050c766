"""A frozen weight with adapters whose gradient to the input is one product.

    dx = (dy @ Wᵀ) · w_scale + (s · dy @ Bᵀ) @ Aᵀ

by `pallas_kernels.out_prod`, with W as it is stored: codes are decoded in the tile, and
the gradient of the input is written once. The forward pass is that of the layers, bit
for bit.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from bitmamba.models.adapters import Adapter
from bitmamba.quant.latent import CodedLatent
from bitmamba.quant.ternary import TernaryWeight
from pallas_kernels import backend

Kernel = jax.Array | TernaryWeight
Forward = Callable[[jax.Array, Kernel, Sequence[Adapter]], jax.Array]


def applies(
    kernels: str,
    x: jax.Array,
    kernel: Kernel | CodedLatent,
    branches: Sequence[Adapter],
    *,
    is_dropping: bool,
    is_latent: bool,
    dtype: Any,
) -> bool:
    """Whether `lora_linear` is to be used.

    Args:
        kernels: "auto", "reference" or "pallas".
        x: (..., D) float.
        kernel: (D, F), an array or packed.
        branches: its adapters.
        is_dropping: dropout is on.
        is_latent: the kernel is a latent weight; it trains.
        dtype: of the computation.

    Raises:
        NotImplementedError: "pallas" was asked for and cannot take this layer. Dropout,
            magnitudes and latent kernels have other gradients: those keep XLA's, the
            first two with a line in the log.
    """
    drops = is_dropping and any(adapter.spec.dropout for adapter in branches)
    scaled = any(adapter.magnitude is not None for adapter in branches)
    if kernels == "reference" or is_latent:
        return False
    if drops or scaled:
        reason = f"an adapter has {'dropout' if drops else 'a magnitude'}"
        backend.log_choice("lora_linear", kernels, "reference", reason)
        return False
    weight = _weight(kernel)
    stored = jnp.int8 if weight.dtype == jnp.int8 else dtype
    dy = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), weight.shape[1]), dtype)
    choice = pallas_kernels.choose_out_prod(
        dy,
        jax.ShapeDtypeStruct(weight.shape, stored),
        transpose_b=True,
        implementation=kernels,
    )
    return choice == "pallas"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def lora_linear(
    forward: Forward,
    dtype: Any,
    x: jax.Array,
    kernel: Kernel,
    branches: Sequence[Adapter],
) -> jax.Array:
    """forward(x, kernel, branches) with the gradient to x as one product.

    Args:
        forward: x @ kernel + sum over branches of scale · (x @ a) @ b, in the layer's
            own arithmetic; its gradients to kernel and branches are taken as they are.
        dtype: of the computation.
        x: (..., D) float.
        kernel: (D, F).
        branches: adapters of columns of the kernel, without magnitude or dropout.

    Returns:
        (..., F), what `forward` returns.

    Numerics: dx is rounded to dtype once, from a float32 sum.
    Gradient: saves the inputs.
    """
    return forward(x, kernel, branches)


def _forward(forward, dtype, x, kernel, branches):
    return forward(x, kernel, branches), (x, kernel, branches)


def _backward(forward, dtype, saved, dy):
    x, kernel, branches = saved
    _, pull = jax.vjp(lambda *rest: forward(x, *rest), kernel, branches)
    flat = dy.reshape(-1, dy.shape[-1]).astype(dtype)
    us = [_low_gradient(flat, adapter, dtype) for adapter in branches]
    vs = [adapter.a.astype(dtype) for adapter in branches]
    weight = _weight(kernel)
    dx = pallas_kernels.out_prod(
        flat,
        weight if weight.dtype == jnp.int8 else weight.astype(dtype),
        transpose_b=True,
        scale=kernel.scale if isinstance(kernel, TernaryWeight) else None,
        tail=(jnp.concatenate(us, axis=1), jnp.concatenate(vs, axis=1)),
        implementation="pallas",
    )
    return dx.reshape(x.shape).astype(x.dtype), *pull(dy)


lora_linear.defvjp(_forward, _backward)


def _low_gradient(dy, adapter, dtype):
    """scale · dy @ bᵀ of the adapted columns, (T, R)."""
    start = adapter.spec.start
    part = dy[:, start : start + adapter.spec.shape[1]]
    return (part @ adapter.b.astype(dtype).T) * adapter.spec.scale


def _weight(kernel: Kernel) -> jax.Array:
    return kernel.codes if isinstance(kernel, TernaryWeight) else kernel
