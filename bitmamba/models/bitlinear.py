"""BitLinear: int8 activations times ternary weights, gradients straight through."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from bitmamba.config import BitLinearConfig
from bitmamba.quant.latent import CodedLatent
from bitmamba.quant.ternary import TernaryWeight, ternarise
from pallas_kernels import backend

MIN_ABSMAX = 1e-5


def quantise_activations(
    x: jax.Array, cfg: BitLinearConfig
) -> tuple[jax.Array, jax.Array]:
    """Quantise to int8 with one scale a token.

    codes = clip(round(x · 127 / m), -128, 127), m = max(max|x|, 1e-5) for
    act_eps="max", max|x| + 1e-5 for "add".

    Args:
        x: (..., D) float.
        cfg: act_eps and rounding ("even" or "away" from zero at ties).

    Returns:
        (codes: (..., D), whole numbers in float32; scale: (..., 1) float32); the
        value is codes * scale.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if cfg.act_eps == "max":
        largest = jnp.maximum(largest, MIN_ABSMAX)
    else:
        largest = largest + MIN_ABSMAX
    rounded = _ROUND[cfg.rounding](x * (127.0 / largest))
    return jnp.clip(rounded, -128, 127), largest / 127.0


def fake_quant_activations(x: jax.Array, cfg: BitLinearConfig) -> jax.Array:
    """The value of the quantised activations, with the gradient of x."""
    codes, scale = quantise_activations(x, cfg)
    return _straight_through(x, codes * scale)


def fake_quant_weight(w: jax.Array | CodedLatent) -> jax.Array:
    """The value of the ternary weight, with the gradient of w (of its latent).

    In float32 whatever w is: bfloat16 would round the scale.
    """
    is_coded = isinstance(w, CodedLatent)
    latent = w.latent if is_coded else w
    weight = w.weight() if is_coded else TernaryWeight(*ternarise(w))
    wide = jnp.promote_types(latent.dtype, jnp.float32)
    return _straight_through(latent.astype(wide), weight.value())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def bit_linear(
    x: jax.Array,
    w: jax.Array,
    cfg: BitLinearConfig,
    dtype: jnp.dtype,
    kernels: str = "auto",
) -> jax.Array:
    """Quantise both sides, multiply, scale.

    y = (x_codes @ w_codes) · x_scale · w_scale, differentiated as if it were
    x_q @ w_q with d x_q / d x = 1 and d w_q / d w = 1 (straight through).

    Args:
        x: (..., D) float32. Activations, after the norm if there is one.
        w: (D, F) float32. Latent weights.
        cfg: how activations are quantised.
        dtype: of the products and of y.
        kernels: implementation of the forward product, `pallas_kernels.bit_product`.

    Returns:
        (..., F) in dtype.

    Numerics: codes are whole numbers up to 128, exact in bfloat16, and their products
        are summed in float32, where they stay exact; the scales enter once, after.
    Gradient: saves the codes as int8 and the scales. Cotangents are multiplied in
        dtype and summed in float32; dx in x.dtype, dw in w.dtype.
    Source: Ma et al. 2024, arXiv:2402.17764; the public BitMamba-2 model.
    """
    return _forward(x, w, cfg, dtype, kernels)[0]


def _forward(x, w, cfg, dtype, kernels):
    quantised = quantise_activations(x, cfg)
    codes = TernaryWeight(*ternarise(w))
    return _multiply(quantised, codes, (x, w), dtype, kernels)


def _multiply(quantised, w, inputs, dtype, kernels):
    x_codes, x_scale = quantised
    y = _scaled_product(x_codes, w.codes, x_scale, w.scale, dtype, kernels)
    # The empty arrays carry the inputs' dtypes to the backward pass.
    like = tuple(jnp.zeros((0,), array.dtype) for array in inputs)
    return y, (x_codes.astype(jnp.int8), x_scale, w.codes, w.scale, like)


def _backward(cfg, dtype, kernels, residuals, dy):
    x_codes, x_scale, w_codes, w_scale, (x_like, w_like) = residuals
    wide = _wide(dtype)
    dx = jnp.dot(dy, w_codes.astype(dtype).T, preferred_element_type=wide)
    scaled = (dy * x_scale).astype(dtype).reshape(-1, dy.shape[-1])
    rows = x_codes.astype(dtype).reshape(-1, x_codes.shape[-1])
    dw = jnp.dot(rows.T, scaled, preferred_element_type=wide)
    return (dx * w_scale).astype(x_like.dtype), dw.astype(w_like.dtype)


bit_linear.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def coded_bit_linear(
    x: jax.Array,
    latent: jax.Array,
    w: TernaryWeight,
    cfg: BitLinearConfig,
    dtype: jnp.dtype,
    kernels: str = "auto",
) -> jax.Array:
    """`bit_linear` with the codes of its latent weight computed beforehand.

    Args:
        x: (..., D) float32. Activations, after the norm if there is one.
        latent: (D, F) float32. Not read; the gradient is its.
        w: its codes (D, F) in int8 and their scale.
        cfg, dtype, kernels: as for `bit_linear`.

    Returns:
        (..., F) in dtype.

    Gradient: that of `bit_linear`, to x and latent; none to w.
    """
    return _coded_forward(x, latent, w, cfg, dtype, kernels)[0]


def _coded_forward(x, latent, w, cfg, dtype, kernels):
    return _multiply(quantise_activations(x, cfg), w, (x, latent), dtype, kernels)


def _coded_backward(cfg, dtype, kernels, residuals, dy):
    return *_backward(cfg, dtype, kernels, residuals, dy), None


coded_bit_linear.defvjp(_coded_forward, _coded_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def frozen_bit_linear(
    x: jax.Array,
    w: TernaryWeight,
    cfg: BitLinearConfig,
    dtype: jnp.dtype,
    kernels: str = "auto",
) -> jax.Array:
    """`bit_linear` with a weight that is quantised already and does not train.

    Args:
        x: (..., D) float32. Activations, after the norm if there is one.
        w: codes (D, F) and their scale.
        cfg, dtype, kernels: as for `bit_linear`, with which y agrees bit for bit.

    Returns:
        (..., F) in dtype.

    Gradient: to x alone, dx = (dy @ codesᵀ) · scale; saves nothing but w itself.
    """
    return _frozen_forward(x, w, cfg, dtype, kernels)[0]


def _frozen_forward(x, w, cfg, dtype, kernels):
    x_codes, x_scale = quantise_activations(x, cfg)
    y = _scaled_product(x_codes, w.codes, x_scale, w.scale, dtype, kernels)
    return y, (w, jnp.zeros((0,), x.dtype))


def _frozen_backward(cfg, dtype, kernels, residuals, dy):
    w, x_like = residuals
    codes = w.codes.astype(dtype)
    dx = jnp.dot(dy, codes.T, preferred_element_type=_wide(dtype))
    return (dx * w.scale).astype(x_like.dtype), None


frozen_bit_linear.defvjp(_frozen_forward, _frozen_backward)


def _scaled_product(x_codes, w_codes, x_scale, w_scale, dtype, kernels):
    """(x_codes @ w_codes) · (x_scale · w_scale) in dtype, the same bits on every path.

    The kernel is for int8 weight codes: it wants them transposed, (F, D).
    """
    flat = jax.ShapeDtypeStruct((x_scale.size, x_codes.shape[-1]), jnp.int8)
    turned = jax.ShapeDtypeStruct(w_codes.shape[::-1], jnp.int8)
    choice = "reference"
    if w_codes.dtype == jnp.int8:
        choice = pallas_kernels.choose_bit_product(
            flat, turned, dtype=dtype, implementation=kernels
        )
    elif kernels == "pallas":
        reason = f"weight codes are held in {w_codes.dtype}, not int8"
        backend.log_choice("bit_product", kernels, choice, reason)
    if choice == "reference":
        product = _product_of_codes(x_codes, w_codes, dtype)
        return (product * (x_scale * w_scale)).astype(dtype)
    y = pallas_kernels.bit_product(
        x_codes.astype(jnp.int8).reshape(flat.shape),
        w_codes.T,
        x_scale=x_scale.reshape(-1, 1),
        w_scale=w_scale,
        dtype=dtype,
        implementation=kernels,
    )
    return y.reshape(*x_codes.shape[:-1], -1)


def _product_of_codes(x_codes, w_codes, dtype):
    """(..., F) whole numbers in the wide dtype: the same on every path.

    int8 weight codes are multiplied as int8 on a GPU, where its tensor cores are two
    to four times as fast at that (pallas_kernels/bitlinear/README.md).
    """

    def in_dtype(x_codes, w_codes):
        return jnp.dot(
            x_codes.astype(dtype),
            w_codes.astype(dtype),
            preferred_element_type=_wide(dtype),
        )

    def in_int8(x_codes, w_codes):
        x_codes = x_codes.astype(jnp.int8)
        whole = jnp.dot(x_codes, w_codes, preferred_element_type=jnp.int32)
        return whole.astype(_wide(dtype))

    if w_codes.dtype != jnp.int8:
        return in_dtype(x_codes, w_codes)
    return jax.lax.platform_dependent(x_codes, w_codes, cuda=in_int8, default=in_dtype)


@jax.custom_vjp
def _straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, exactly, with the gradient of x."""
    return value.astype(x.dtype)


def _straight_through_forward(x, value):
    return value.astype(x.dtype), None


def _straight_through_backward(_, dy):
    return dy, None


_straight_through.defvjp(_straight_through_forward, _straight_through_backward)


def _wide(dtype):
    """float32, or the dtype itself where it is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def _round_away(x: jax.Array) -> jax.Array:
    """Round to nearest, ties away from zero (C's roundf)."""
    whole = jnp.trunc(x)
    return whole + jnp.sign(x) * (jnp.abs(x - whole) >= 0.5)


_ROUND = {"even": jnp.round, "away": _round_away}
