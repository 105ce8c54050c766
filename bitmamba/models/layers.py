"""Linear layers, norms and the head: thin modules over pure functions."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import BitLinearConfig, ModelConfig
from bitmamba.models import adapters, bitlinear, init, lora_linear
from bitmamba.models.recompute import recompute
from bitmamba.quant.latent import CodedLatent
from bitmamba.quant.ternary import TernaryWeight
from bitmamba.types import Features

Kernel = jax.Array | TernaryWeight | CodedLatent


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
    x: jax.Array,
    w: Kernel,
    *,
    bit: BitLinearConfig | None,
    dtype: jnp.dtype,
    kernels: str = "auto",
) -> jax.Array:
    """The one product of activations and a kernel, whatever the kernel is.

    Args:
        x: (..., D) float.
        w: (D, F) float; or a ternary weight, frozen or with its latent, which needs
            `bit`.
        bit: quantise both sides so (BitLinear), or None for a plain product.
        dtype: of the computation.
        kernels: implementation of the products of codes.

    Returns:
        (..., F) in dtype.
    """
    if bit is None:
        # Flat, because XLA:CPU is slow at weight gradients that contract two axes.
        flat = x.reshape(-1, x.shape[-1]).astype(dtype)
        return jnp.dot(flat, w.astype(dtype)).reshape(*x.shape[:-1], w.shape[1])
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if isinstance(w, TernaryWeight):
        return bitlinear.frozen_bit_linear(x, w, bit, jnp.dtype(dtype), kernels)
    if isinstance(w, CodedLatent):
        rest = (w.latent, w.weight(), bit, jnp.dtype(dtype), kernels)
        return bitlinear.coded_bit_linear(x, *rest)
    return bitlinear.bit_linear(x, w, bit, jnp.dtype(dtype), kernels)


def kernel_of(
    module: nn.Module, make: init.Initializer, shape: tuple[int, int]
) -> Kernel:
    """The module's "kernel", an array or packed; Flax's own check wants an array."""
    if module.has_variable("params", "kernel"):
        kernel = module.get_variable("params", "kernel")
        if isinstance(kernel, TernaryWeight | CodedLatent):
            return kernel
    return module.param("kernel", make, shape)


def _unquantised(kernel: Kernel) -> jax.Array:
    """The latent weight; of a frozen ternary one its value, as it has no other."""
    if isinstance(kernel, TernaryWeight):
        return kernel.value()
    return kernel.latent if isinstance(kernel, CodedLatent) else kernel


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale; float32 in and out.

    With a gate z it is the norm of x · silu(z). Saves its inputs only.
    """

    eps: float
    n_groups: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, z: jax.Array | None = None) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)

        def norm(scale, x, z=None):
            x = x if z is None else gated(x, z)
            return rms_norm(x, scale, eps=self.eps, n_groups=self.n_groups)

        inputs = (scale, x) if z is None else (scale, x, z)
        return recompute(norm)(*inputs)


def gated(x: jax.Array, z: jax.Array) -> jax.Array:
    """x · silu(z)."""
    return x * jax.nn.silu(z)


class Linear(nn.Module):
    """A projection without bias; with its own norm where the config places it here."""

    n_features: int
    cfg: ModelConfig
    init_scale: float = 1.0
    kernels: str = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1], self.n_features)
        kernel = kernel_of(self, init.projection(self.init_scale), shape)
        if self.cfg.norm_placement == "linear":
            x = RMSNorm(self.cfg.norm_eps, name="norm")(x)
        bit = self.cfg.bitlinear if self.cfg.linear == "bit" else None
        dtype = jnp.dtype(self.cfg.dtype)
        branches = adapters.adapters_of(self)
        if not branches:
            return linear(x, kernel, bit=bit, dtype=dtype, kernels=self.kernels)
        key = adapters.dropout_key(self)

        def forward(x, kernel, branches):
            y = linear(x, kernel, bit=bit, dtype=dtype, kernels=self.kernels)
            weight = _unquantised(kernel)
            return adapters.add_branches(y, x, branches, weight=weight, key=key)

        if lora_linear.applies(
            self.kernels,
            x,
            kernel,
            branches,
            is_dropping=key is not None,
            is_latent=bit is not None and not isinstance(kernel, TernaryWeight),
            dtype=dtype,
        ):
            return lora_linear.lora_linear(forward, dtype, x, kernel, branches)
        return forward(x, kernel, branches)


class Head(nn.Module):
    """The untied head as (hidden, kernel), so that the loss can form logits in blocks.

    A ternary head gives the *quantised* values of both, with straight-through
    gradients, in float32: bfloat16 would round the scales.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> Features:
        shape = (x.shape[-1], self.cfg.vocab_size)
        kernel = kernel_of(self, init.projection(), shape)
        if self.cfg.norm_placement == "linear":
            x = RMSNorm(self.cfg.norm_eps, name="norm")(x)
        features = self._features(x, kernel)
        branches = adapters.adapters_of(self)
        if not branches:
            return features
        key = adapters.dropout_key(self)
        return adapters.adapt_head(features, x, branches, key=key)

    def _features(self, x: jax.Array, kernel: Kernel) -> Features:
        if self.cfg.linear == "bit":
            hidden = bitlinear.fake_quant_activations(x, self.cfg.bitlinear)
            if isinstance(kernel, TernaryWeight):
                return Features(hidden * kernel.scale, kernel.codes)
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
        x = jnp.take(self.embedding, tokens, axis=0, mode="fill")
        for adapter in adapters.adapters_of(self):
            low = jnp.take(adapter.a, tokens, axis=0, mode="fill")
            x = x + adapter.spec.scale * (low @ adapter.b)
        return x

    def tied_head(self, x: jax.Array) -> Features:
        """Logits against the (adapted) embedding itself, never quantised."""
        dtype = jnp.dtype(self.cfg.dtype)
        features = Features(x.astype(dtype), self.embedding.astype(dtype).T)
        transposed = [adapters.transposed(a) for a in adapters.adapters_of(self)]
        return adapters.adapt_head(features, x, transposed, key=None)
