"""Causal grouped-query attention with optional rotary positions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from bitmamba.config import ModelConfig
from bitmamba.models.cache import KVCache, document_positions, real_tokens
from bitmamba.models.layers import Linear

# Finite, so that a row without any visible key stays finite; exp gives exactly 0.
MASKED = -1e30


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary positions: the pair (i, i + P/2) turns by position · theta^(-2i/P).

    Args:
        x: (B, L, heads, P) float.
        positions: (B, L) int32.
        theta: base of the wavelengths.

    Returns:
        (B, L, heads, P) in x.dtype.

    Numerics: angles and products in float32.
    Source: Su et al. 2021, arXiv:2104.09864, in the half-split order of GPT-NeoX.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    first, second = wide[..., :half], wide[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def grouped_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array
) -> jax.Array:
    """softmax(q · k / sqrt(P)) v, each key head serving n_heads / n_kv_heads queries.

    Args:
        queries: (B, L, n_heads, P) float.
        keys, values: (B, S, n_kv_heads, P) float.
        visible: (B, L, S) bool. Which keys each query may see.

    Returns:
        (B, L, n_heads, P) in the dtype of values.

    Numerics: scores and softmax in float32. What is not visible has weight exactly 0,
        forward and backward, so it moves no bit of the result.
    """
    batch, length, n_heads, width = queries.shape
    n_kv = keys.shape[2]
    grouped = queries.reshape(batch, length, n_kv, n_heads // n_kv, width)
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    scores = jnp.einsum(
        "blkrp,bskp->bkrls", grouped, keys, preferred_element_type=wide
    ) * (width**-0.5)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bkrls,bskp->blkrp", weights.astype(values.dtype), values)
    return mixed.reshape(batch, length, n_heads, width)


class Attention(nn.Module):
    """q_proj, k_proj, v_proj, rotary positions, attention, o_proj; no biases."""

    cfg: ModelConfig
    kernels: str = "auto"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        state: KVCache | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Mix tokens of the same document, each seeing itself and those before.

        Args:
            x: (B, L, D) float.
            segment_ids: (B, L) int32 or None. Without a state, tokens see their own
                segment only; with one, segment 0 is padding, hidden from all others.
            positions: (B, L) int32 or None for 0, 1, ... from each document's start.
            state: cache of earlier tokens, or None.

        Returns:
            ((B, L, D), the cache with these tokens added, or None without one).
        """
        cfg = self.cfg.attention
        if positions is None:
            positions = document_positions(x, segment_ids)
        queries = self._heads("q_proj", cfg.n_heads, x)
        keys = self._heads("k_proj", cfg.n_kv_heads, x)
        values = self._heads("v_proj", cfg.n_kv_heads, x)
        if cfg.rope_theta:
            queries = rotate(queries, positions, cfg.rope_theta)
            keys = rotate(keys, positions, cfg.rope_theta)
        if state is None:
            visible = _same_document(x, segment_ids)
        else:
            state = _append(state, keys, values, real_tokens(x, segment_ids))
            keys, values = state.keys, state.values
            visible = _written_before(state, x.shape[1])
        mixed = grouped_attention(queries, keys.astype(values.dtype), values, visible)
        scale = len(self.cfg.layers) ** -0.5
        out = Linear(self.cfg.d_model, self.cfg, scale, self.kernels, name="o_proj")
        return out(mixed.reshape(*x.shape[:2], -1)), state

    def _heads(self, name: str, n_heads: int, x: jax.Array) -> jax.Array:
        """Project to (B, L, n_heads, P)."""
        width = self.cfg.attention.headdim
        y = Linear(n_heads * width, self.cfg, kernels=self.kernels, name=name)(x)
        return y.reshape(*x.shape[:2], n_heads, width)

    @staticmethod
    def init_state(cfg: ModelConfig, batch: int, max_len: int, dtype: Any) -> KVCache:
        """An empty cache with room for max_len tokens."""
        shape = (batch, max_len, cfg.attention.n_kv_heads, cfg.attention.headdim)
        empty = jnp.zeros(shape, dtype)
        is_real = jnp.zeros((batch, max_len), bool)
        return KVCache(empty, empty, is_real, jnp.zeros((), jnp.int32))


def _same_document(x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """(B, L, L) bool: causal, within the segment."""
    length = x.shape[1]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    if segment_ids is None:
        return causal
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def _append(
    state: KVCache, keys: jax.Array, values: jax.Array, is_real: jax.Array
) -> KVCache:
    """Write L new slots after those written."""
    at = state.n_written

    def put(cache, new):
        return jax.lax.dynamic_update_slice_in_dim(
            cache, new.astype(cache.dtype), at, axis=1
        )

    return KVCache(
        put(state.keys, keys),
        put(state.values, values),
        put(state.is_real, is_real),
        at + keys.shape[1],
    )


def _written_before(state: KVCache, length: int) -> jax.Array:
    """(B, L, S) bool: real slots up to and including each of the last L tokens."""
    slots = jnp.arange(state.keys.shape[1])
    query_slots = state.n_written - length + jnp.arange(length)
    return (slots <= query_slots[:, None]) & state.is_real[:, None, :]
