"""Linear layers, norms and the head: thin modules over pure functions."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import BitLinearConfig, ModelConfig
from bitmamba.models import bitlinear, init
from bitmamba.types import Features


def rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, n_groups: int = 1
) -> jax.Array:
    """x / sqrt(mean(x²) + eps) · scale, over each of n_groups equal parts.

    Args:
        x: (..., D) float.
        scale: (D,) float32.
        eps: added to the mean square.
        n_groups: the mean is taken over D / n_groups channels.

    Returns:
        (..., D) float32.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    parts = x.reshape(*x.shape[:-1], n_groups, -1)
    mean_square = jnp.mean(parts * parts, axis=-1, keepdims=True)
    return (parts * jax.lax.rsqrt(mean_square + eps)).reshape(x.shape) * scale


def linear(
    x: jax.Array, w: jax.Array, *, bit: BitLinearConfig | None, dtype: jnp.dtype
) -> jax.Array:
    """The one product of activations and a kernel, whatever the kernel is.

    Args:
        x: (..., D) float.
        w: (D, F) float32.
        bit: quantise both sides so (BitLinear), or None for a plain product.
        dtype: of the computation.

    Returns:
        (..., F) in dtype.
    """
    if bit is None:
        # Flat, because XLA:CPU is slow at weight gradients that contract two axes.
        flat = x.reshape(-1, x.shape[-1]).astype(dtype)
        return jnp.dot(flat, w.astype(dtype)).reshape(*x.shape[:-1], w.shape[1])
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return bitlinear.bit_linear(x, w, bit, jnp.dtype(dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale; float32 in and out."""

    eps: float
    n_groups: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return rms_norm(x, scale, eps=self.eps, n_groups=self.n_groups)


class Linear(nn.Module):
    """A projection without bias; with its own norm where the config places it here."""

    n_features: int
    cfg: ModelConfig
    init_scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1], self.n_features)
        kernel = self.param("kernel", init.projection(self.init_scale), shape)
        if self.cfg.norm_placement == "linear":
            x = RMSNorm(self.cfg.norm_eps, name="norm")(x)
        bit = self.cfg.bitlinear if self.cfg.linear == "bit" else None
        return linear(x, kernel, bit=bit, dtype=jnp.dtype(self.cfg.dtype))


class Head(nn.Module):
    """The untied head as (hidden, kernel), so that the loss can form logits in blocks.

    A ternary head gives the *quantised* values of both, with straight-through
    gradients, in float32: bfloat16 would round the scales.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> Features:
        shape = (x.shape[-1], self.cfg.vocab_size)
        kernel = self.param("kernel", init.projection(), shape)
        if self.cfg.norm_placement == "linear":
            x = RMSNorm(self.cfg.norm_eps, name="norm")(x)
        if self.cfg.linear == "bit":
            hidden = bitlinear.fake_quant_activations(x, self.cfg.bitlinear)
            return Features(hidden, bitlinear.fake_quant_weight(kernel))
        dtype = jnp.dtype(self.cfg.dtype)
        return Features(x.astype(dtype), kernel.astype(dtype))


class Embed(nn.Module):
    """Token embedding, float32; an id outside the vocabulary gives NaN, not a guess."""

    cfg: ModelConfig

    def setup(self):
        shape = (self.cfg.vocab_size, self.cfg.d_model)
        self.embedding = self.param("embedding", init.embedding, shape, jnp.float32)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, tokens, axis=0, mode="fill")

    def tied_head(self, x: jax.Array) -> Features:
        """Logits against the embedding itself, never quantised."""
        dtype = jnp.dtype(self.cfg.dtype)
        return Features(x.astype(dtype), self.embedding.astype(dtype).T)
