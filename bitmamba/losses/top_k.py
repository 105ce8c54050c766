"""The largest logits of each token, without all logits of all tokens at once."""

import jax
import jax.numpy as jnp
from jax import lax

from bitmamba.losses.feature_kl import check_features, positions_per_block
from bitmamba.losses.kl import accumulator, map_positions


def top_k_logits(
    hidden: jax.Array, head: jax.Array, k: int, *, block_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Entries of the vocabulary with the largest logits, as `tmkl_topk` reads them.

    Args:
        hidden, head: (..., L, D) and (D, V) float.
        k: K, how many; at most V.
        block_size: positions (along the last token axis) whose logits are formed at a
            time; None chooses so that a block holds at most MAX_BLOCK_LOGITS.

    Returns:
        ids (..., L, K) int32, distinct, and logits (..., L, K), largest first, float32
        (float64 for float64 input).

    Raises:
        ValueError: shapes disagree, k not in [1, V], or block_size < 1.
    """
    tokens, vocab_size = hidden.shape[:-1], head.shape[1]
    check_features("top_k_logits", "", hidden, head, tokens, vocab_size)
    if not 1 <= k <= vocab_size:
        raise ValueError(
            f"top_k_logits: k: got {k}; expected 1 to {vocab_size}, the vocabulary"
        )
    if block_size is None:
        block_size = positions_per_block(tokens, vocab_size, models=1)
    if block_size < 1:
        raise ValueError(
            f"top_k_logits: block_size: got {block_size}; expected at least 1"
        )
    dtype = accumulator(hidden.dtype)

    def largest(block):
        logits, ids = lax.top_k(jnp.dot(block, head, preferred_element_type=dtype), k)
        return ids, logits

    return map_positions(largest, hidden, axis=hidden.ndim - 2, block_size=block_size)
