"""What decoding carries from token to token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class SSMState(NamedTuple):
    """conv: (B, K-1, C) last inputs of the convolution. ssm: (B, H, P, N) float32."""

    conv: jax.Array
    ssm: jax.Array


class KVCache(NamedTuple):
    """Keys and values of the slots written so far.

    keys, values: (B, S, n_kv_heads, headdim), S = max_len. is_real: (B, S) bool, False
    for padding and for slots not written yet. n_written: () int32, the same for every
    row; writing beyond S overwrites the last slots, so the caller must make room.
    """

    keys: jax.Array
    values: jax.Array
    is_real: jax.Array
    n_written: jax.Array


class DecodeState(NamedTuple):
    """layers: one entry a layer (SSMState, KVCache or None). positions: (B,) int32."""

    layers: tuple[Any, ...]
    positions: jax.Array


def real_tokens(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """(B, L) bool: False on padding (segment id 0)."""
    if segment_ids is None:
        return jnp.ones(tokens.shape[:2], bool)
    return segment_ids != 0


def document_positions(x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """(B, L) int32: 0, 1, ... from the first token of every document on.

    Args:
        x: (B, L, ...), for its shape alone.
        segment_ids: (B, L) int32, or None for one document a row.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(x.shape[:2], jnp.int32)
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(starts, ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
