"""Next-token cross-entropy from features, without ever forming all the logits."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

# 2**25 float32 logits are 128 MiB; below that one block is the fastest.
MAX_BLOCK_LOGITS = 2**25


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    block_size: int | None = None,
) -> jax.Array:
    """Negative log-likelihood of each target under softmax(hidden @ head).

    nll_t = logsumexp_v(h_t · w_v) - h_t · w_target(t), in float32.

    Args:
        hidden: (..., D) float. Features after the final norm.
        head: (D, V). A head that does not train may be of another dtype, integers
            too; its blocks are cast as they are used.
        targets: (...) int32 in [0, V).
        block_size: columns of the vocabulary formed at a time; None chooses so that
            a block holds at most MAX_BLOCK_LOGITS logits.

    Returns:
        (...) float32, one value a token; >= 0.

    Raises:
        ValueError: shapes disagree, or block_size < 1.

    Numerics: products accumulate in float32 (float64 for float64 input); running
        maximum and sum, so any finite logits give a finite value.
    Gradient: to hidden and head, of their dtypes. The logits of a single block are
        kept; of several blocks each is formed again, so that the peak is one block,
        (T, block_size), besides the gradients.
    """
    if hidden.shape[-1] != head.shape[0] or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"cross_entropy: got hidden {hidden.shape}, head {head.shape}, targets "
            f"{targets.shape}; expected (..., D), (D, V), (...)"
        )
    vocab_size = head.shape[1]
    flat = hidden.reshape(-1, hidden.shape[-1])
    if block_size is None:
        block_size = max(1, MAX_BLOCK_LOGITS // max(1, flat.shape[0]))
    if block_size < 1:
        raise ValueError(f"cross_entropy: got block_size {block_size}; expected >= 1")
    if block_size >= vocab_size:
        nll = _nll_whole(flat, head, targets.reshape(-1))
    else:
        nll = _nll(flat, head, targets.reshape(-1), block_size)
    return nll.reshape(targets.shape)


@jax.custom_vjp
def _nll_whole(hidden, head, targets):
    """All logits are one block: they are kept for the backward pass."""
    return _nll_whole_forward(hidden, head, targets)[0]


def _nll_whole_forward(hidden, head, targets):
    dtype = _accumulator(hidden.dtype)
    columns = head.astype(hidden.dtype)
    logits = jnp.dot(hidden, columns, preferred_element_type=dtype)
    peak = logits.max(-1)
    log_sum = peak + jnp.log(jnp.exp(logits - peak[:, None]).sum(-1))
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return log_sum - picked, (hidden, head, targets, log_sum, logits)


def _nll_whole_backward(residuals, cotangent):
    hidden, head, targets, log_sum, logits = residuals
    dtype = _accumulator(hidden.dtype)
    probability = jnp.exp(logits - log_sum[:, None])
    is_target = targets[:, None] == jnp.arange(head.shape[1])
    d_logits = (probability - is_target) * cotangent[:, None]
    d_logits = d_logits.astype(hidden.dtype)
    columns = head.astype(hidden.dtype)
    d_hidden = jnp.dot(d_logits, columns.T, preferred_element_type=dtype)
    d_hidden = d_hidden.astype(hidden.dtype)
    if not jnp.issubdtype(head.dtype, jnp.floating):  # codes, which do not train
        return d_hidden, None, None
    d_head = jnp.dot(hidden.T, d_logits, preferred_element_type=dtype)
    return d_hidden, d_head.astype(head.dtype), None


_nll_whole.defvjp(_nll_whole_forward, _nll_whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _nll(hidden, head, targets, block_size):
    return _nll_forward(hidden, head, targets, block_size)[0]


def _accumulator(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _block_logits(hidden, head, start, block_size):
    """(T, block_size) logits from column `start`; columns past V are -inf."""
    columns, valid = _block(head, start, block_size)
    columns = columns.astype(hidden.dtype)
    dtype = _accumulator(hidden.dtype)
    logits = jnp.dot(hidden, columns, preferred_element_type=dtype)
    return jnp.where(valid, logits, -jnp.inf), columns, valid


def _block(head, start, block_size):
    """Columns start...; the last block is moved back to fit, its overlap not valid."""
    first = jnp.minimum(start, head.shape[1] - block_size)
    columns = lax.dynamic_slice_in_dim(head, first, block_size, axis=1)
    return columns, first + jnp.arange(block_size) >= start


def _nll_forward(hidden, head, targets, block_size):
    dtype = _accumulator(hidden.dtype)
    n_tokens, vocab_size = hidden.shape[0], head.shape[1]

    def body(carry, start):
        peak, total, picked = carry
        logits, _, _ = _block_logits(hidden, head, start, block_size)
        new_peak = jnp.maximum(peak, logits.max(-1))
        total = total * jnp.exp(peak - new_peak)
        total += jnp.exp(logits - new_peak[:, None]).sum(-1)
        column = targets - jnp.minimum(start, vocab_size - block_size)
        inside = (targets >= start) & (column < block_size)
        at = jnp.clip(column, 0, block_size - 1)[:, None]
        value = jnp.take_along_axis(logits, at, axis=1)[:, 0]
        return (new_peak, total, jnp.where(inside, value, picked)), None

    start = jnp.full((n_tokens,), -jnp.inf, dtype)
    zeros = jnp.zeros((n_tokens,), dtype)
    starts = jnp.arange(0, vocab_size, block_size)
    (peak, total, picked), _ = lax.scan(body, (start, zeros, zeros), starts)
    log_sum = peak + jnp.log(total)
    return log_sum - picked, (hidden, head, targets, log_sum)


def _nll_backward(block_size, residuals, cotangent):
    hidden, head, targets, log_sum = residuals
    dtype = _accumulator(hidden.dtype)
    vocab_size = head.shape[1]
    trains = jnp.issubdtype(head.dtype, jnp.floating)

    def body(carry, start):
        d_hidden, d_head = carry
        logits, columns, valid = _block_logits(hidden, head, start, block_size)
        first = jnp.minimum(start, vocab_size - block_size)
        is_target = (targets - first)[:, None] == jnp.arange(block_size)
        is_target &= valid
        probability = jnp.exp(logits - log_sum[:, None])
        d_logits = (probability - is_target) * cotangent[:, None]
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden += jnp.dot(d_logits, columns.T, preferred_element_type=dtype)
        if not trains:
            return (d_hidden, None), None
        d_columns = jnp.dot(hidden.T, d_logits, preferred_element_type=dtype)
        old = lax.dynamic_slice_in_dim(d_head, first, block_size, axis=1)
        new = (old + d_columns).astype(head.dtype)
        return (d_hidden, lax.dynamic_update_slice_in_dim(d_head, new, first, 1)), None

    starts = jnp.arange(0, vocab_size, block_size)
    begin = (jnp.zeros(hidden.shape, dtype), jnp.zeros_like(head) if trains else None)
    (d_hidden, d_head), _ = lax.scan(body, begin, starts)
    return d_hidden.astype(hidden.dtype), d_head, None


_nll.defvjp(_nll_forward, _nll_backward)
