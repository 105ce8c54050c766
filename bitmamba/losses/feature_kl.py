"""Divergence from features: both models' logits exist for a block of tokens only.

For each token t: d_hidden_t = c_t (g_t @ head.T), g_t being the row
gradient and c_t the cotangent. The first factor needs no cotangent, so the forward
pass makes it while the logits are there, and the backward pass of a frozen head is
one product by c_t: 3 products in all (both models' logits, and this one). d_head
needs c_t inside the sum; it forms the logits again, and only if it is asked for.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bitmamba.losses.cross_entropy import MAX_BLOCK_LOGITS
from bitmamba.losses.kl import Rule, accumulator, map_positions, row_kl, take_block


class Fixed(NamedTuple):
    """Per token, what the adapted model is compared with; never differentiated.

    targets: (..., L) int32, left out of both distributions, or None.
    hidden: (..., L, D) features of the fixed model, or None: ids and logits count.
    ids, logits: (..., L, K) entries of the vocabulary and their logits.
    """

    targets: jax.Array | None = None
    hidden: jax.Array | None = None
    ids: jax.Array | None = None
    logits: jax.Array | None = None


def positions_per_block(shape: tuple[int, ...], vocab_size: int, models: int) -> int:
    """Positions of `shape` (..., L) whose logits fit MAX_BLOCK_LOGITS; at least 1."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return max(1, MAX_BLOCK_LOGITS // max(1, models * rows * vocab_size))


def feature_kl(
    hidden: jax.Array,
    head: jax.Array,
    fixed: Fixed,
    *,
    fixed_head: jax.Array | None,
    rule: Rule,
    block_size: int | None,
) -> jax.Array:
    """Per-token divergence from features: (..., D) and (D, V) -> (...) float32.

    Gradient: to hidden and head, of their dtypes; none to what is fixed. In memory:
        one block of both models' logits and, for the backward pass, (..., D) float32.
        d_head besides adds up in a (D, V) float32 array.
    """
    if block_size is None:
        block_size = positions_per_block(hidden.shape[:-1], head.shape[1], models=2)
    if hidden.ndim == 1:  # one token without an axis
        hidden, fixed = jax.tree.map(lambda a: a[None], (hidden, fixed))
        return _feature_kl(rule, block_size, hidden, head, fixed, fixed_head)[0]
    return _feature_kl(rule, block_size, hidden, head, fixed, fixed_head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feature_kl(rule, block_size, hidden, head, fixed, fixed_head):
    def values(block):
        return _block_kl(rule, *block, head, fixed_head)[0]

    axis = hidden.ndim - 2
    return map_positions(values, (hidden, fixed), axis=axis, block_size=block_size)


def _block_kl(rule, hidden, fixed, head, fixed_head):
    """(kl, gradient by the adapted logits) of a block, from features."""
    dtype = accumulator(hidden.dtype)
    adapted = jnp.dot(hidden, head, preferred_element_type=dtype)
    if fixed_head is None:
        logits = _spread(fixed.ids, fixed.logits.astype(dtype), head.shape[1])
    else:
        wide = accumulator(fixed.hidden.dtype)
        logits = jnp.dot(fixed.hidden, fixed_head, preferred_element_type=wide)
        logits = logits.astype(dtype)
    included = logits != -jnp.inf if rule.support == "top_k" else True
    if fixed.targets is not None:
        included &= jnp.arange(head.shape[1]) != fixed.targets[..., None]
    return row_kl(logits, adapted, included, rule)


def _spread(ids, logits, vocab_size):
    """(..., V) from (..., K): -inf where no id points; NaN rows for ids outside."""
    inside = (ids >= 0) & (ids < vocab_size)
    wrong = (~inside & (logits != -jnp.inf)) | jnp.isnan(logits)
    fill = jnp.where(wrong.any(-1), jnp.nan, -jnp.inf).astype(logits.dtype)

    def one(fill, ids, logits):
        # max: padding (-inf) may carry the id of a real entry.
        return jnp.full((vocab_size,), fill).at[ids].max(logits)

    for _ in range(ids.ndim - 1):
        one = jax.vmap(one)
    return one(fill, jnp.where(inside, ids, 0), jnp.where(inside, logits, -jnp.inf))


def _feature_kl_forward(rule, block_size, hidden, head, fixed, fixed_head):
    dtype = accumulator(hidden.dtype)

    def values(block):
        kl, gradient = _block_kl(rule, *block, head, fixed_head)
        gradient = gradient.astype(hidden.dtype)
        return kl, jnp.dot(gradient, head.T, preferred_element_type=dtype)

    axis = hidden.ndim - 2
    kl, direction = map_positions(
        values, (hidden, fixed), axis=axis, block_size=block_size
    )
    return kl, (direction, hidden, head, fixed, fixed_head)


def _feature_kl_backward(rule, block_size, residuals, cotangent):
    direction, hidden, head, fixed, fixed_head = residuals
    d_hidden = (direction * cotangent[..., None]).astype(hidden.dtype)
    if not jnp.issubdtype(head.dtype, jnp.floating):  # codes, which do not train
        return d_hidden, None, None, None
    d_head = _head_gradient(
        rule, block_size, hidden, head, fixed, fixed_head, cotangent
    )
    return d_hidden, d_head, None, None


def _head_gradient(rule, block_size, hidden, head, fixed, fixed_head, cotangent):
    axis, length = hidden.ndim - 2, hidden.shape[-2]
    dtype = accumulator(hidden.dtype)
    block_size = min(block_size, length)

    def body(d_head, start):
        first = jnp.minimum(start, length - block_size)
        block = take_block((hidden, fixed, cotangent), first, axis, block_size)
        rows, known, weight = block
        weight *= first + jnp.arange(block_size) >= start  # each position once
        gradient = _block_kl(rule, rows, known, head, fixed_head)[1]
        gradient = (gradient * weight[..., None]).astype(hidden.dtype)
        flat = rows.reshape(-1, rows.shape[-1]), gradient.reshape(-1, head.shape[1])
        return d_head + jnp.dot(flat[0].T, flat[1], preferred_element_type=dtype), None

    begin = jnp.zeros(head.shape, dtype)
    starts = jnp.arange(0, length, max(1, block_size))
    return lax.scan(body, begin, starts)[0].astype(head.dtype)


_feature_kl.defvjp(_feature_kl_forward, _feature_kl_backward)


def check_features(
    where: str,
    name: str,
    hidden: jax.Array,
    head: jax.Array,
    tokens: tuple[int, ...],
    vocab_size: int,
) -> None:
    """Refuse features which are not (*tokens, D) and (D, vocab_size)."""
    fits = hidden.shape[:-1] == tokens and head.shape == (hidden.shape[-1], vocab_size)
    if not fits:
        raise ValueError(
            f"{where}: got {name}hidden {hidden.shape}, {name}head {head.shape} for "
            f"tokens {tokens}; expected (*{tokens}, D), (D, {vocab_size})"
        )


def check_entries(
    where: str,
    name: str,
    ids: jax.Array,
    logits: jax.Array,
    tokens: tuple[int, ...],
) -> None:
    """Refuse stored entries which are not (*tokens, K), twice."""
    if ids.shape != logits.shape or ids.shape[:-1] != tokens:
        raise ValueError(
            f"{where}: got {name}ids {ids.shape}, {name}logits {logits.shape} for "
            f"tokens {tokens}; expected (*{tokens}, K) for both"
        )
