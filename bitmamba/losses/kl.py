"""Divergence of an adapted model from fixed logits, row by row.

One function serves the target-masked KL (`tmkl.py`) and distillation
(`distill.py`); they differ in where the fixed logits come from and which entries
of the vocabulary take part.

With p, q the fixed and the adapted distribution over the entries that take part,
and z the adapted logits:
    forward: KL(p || q) = sum_v p_v log(p_v / q_v);  d/dz_v = q_v - p_v
    reverse: KL(q || p) = sum_v q_v log(q_v / p_v);  d/dz_v = q_v (log(q_v / p_v) - KL)
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Direction = Literal["forward", "reverse"]
Support = Literal["vocabulary", "top_k"]

# Log-probabilities stop here, so that 0 * log 0 is 0 and 1e6 such tokens still add
# up to a finite float32.
LOWEST = -1e30


class Rule(NamedTuple):
    """What is compared; hashable, static under jit.

    direction: "forward" or "reverse".
    temperature: divides both logits; the value is multiplied by its square.
    support: the adapted distribution is over the "vocabulary", or over those entries
        which the fixed one knows ("top_k").
    """

    direction: Direction = "forward"
    temperature: float = 1.0
    support: Support = "vocabulary"


def accumulator(dtype: Any) -> Any:
    """float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def row_kl(
    fixed: jax.Array, adapted: jax.Array, included: jax.Array | bool, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Divergence of each row and its exact gradient by the adapted logits.

    Args:
        fixed, adapted: (..., V) float32 or float64 logits, finite or -inf.
        included: (..., V) bool; other entries take part in neither distribution.
        rule: its `support` has been turned into `included` by the caller.

    Returns:
        kl (...), >= 0, and gradient (..., V), 0 where not included.

    Numerics: a row with no finite included logit in either model gives 0 and a zero
        gradient. log p and log q stop at LOWEST: where one model forbids what the
        other allows and the divergence is infinite, it is that probability times
        1e30. Each term is p_v f(log p_v/q_v) with f(r) = r - 1 + exp(-r) >= 0,
        whose sum is the same: rounding of the two normalisers cancels, and equal
        logits give exactly 0. NaN and +inf logits give NaN.
    """
    log_p, no_p = _log_probabilities(fixed, included, rule.temperature)
    log_q, no_q = _log_probabilities(adapted, included, rule.temperature)
    ratio, p, q = log_p - log_q, jnp.exp(log_p), jnp.exp(log_q)
    if rule.direction == "forward":
        kl = _terms(p, q, ratio).sum(-1)
        gradient = q - p
    else:
        kl = _terms(q, p, -ratio).sum(-1)
        # Relative to the likeliest entry, where log q/p - KL is a small difference.
        # The mean has the ratio's own rounding, so that the gradient adds up to 0.
        likeliest = q.argmax(-1, keepdims=True)
        ratio -= jnp.take_along_axis(ratio, likeliest, -1)
        gradient = q * ((q * ratio).sum(-1, keepdims=True) - ratio)
    empty = no_p | no_q
    kl = jnp.where(empty[..., 0], 0.0, kl * rule.temperature**2)
    return kl, jnp.where(empty, 0.0, gradient * rule.temperature)


def _log_probabilities(logits, included, temperature):
    """Log-softmax over `included`, at least about LOWEST; and which rows are empty."""
    masked = jnp.where(included, logits, -jnp.inf)
    peak = masked.max(-1, keepdims=True)
    empty = peak == -jnp.inf
    shifted = jnp.maximum((masked - peak) / temperature, LOWEST)
    return shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True)), empty


def _terms(p, q, ratio):
    """p (r - 1 + exp(-r)) = p r + q - p, without cancellation where r is small."""
    is_small = jnp.abs(ratio) < 0.25
    small = jnp.where(is_small, ratio, 0.0)
    # r - 1 + exp(-r) = r²/2 (1 - r/3 (1 - r/4 (...))): faster than expm1, as exact.
    series = jnp.ones_like(small)
    for n in range(12, 2, -1):
        series = 1 - small * series * (1 / n)
    near = p * (small * small * series * 0.5)
    return jnp.where(is_small, near, p * ratio + (q - p))


def map_positions(function, arrays: Any, *, axis: int, block_size: int) -> Any:
    """Apply function to blocks of positions along `axis` of every array.

    The batch axes before `axis` stay whole, so that a sharded batch stays where it
    is. The last block is moved back to fit; what overlaps is written twice, alike.
    """
    length = jax.tree.leaves(arrays)[0].shape[axis]
    if length <= block_size:
        return function(arrays)
    shapes = jax.eval_shape(function, take_block(arrays, 0, axis, block_size))
    out = jax.tree.map(
        lambda s: jnp.zeros((*s.shape[:axis], length, *s.shape[axis + 1 :]), s.dtype),
        shapes,
    )

    def body(out, start):
        first = jnp.minimum(start, length - block_size)
        new = function(take_block(arrays, first, axis, block_size))
        return jax.tree.map(
            lambda o, n: lax.dynamic_update_slice_in_dim(o, n, first, axis), out, new
        ), None

    return lax.scan(body, out, jnp.arange(0, length, block_size))[0]


def take_block(arrays, first, axis, block_size):
    """block_size positions from `first` along `axis` of every array."""
    return jax.tree.map(
        lambda a: lax.dynamic_slice_in_dim(a, first, block_size, axis), arrays
    )


def check_choices(where: str, rule: Rule, block_size: int | None) -> None:
    """Refuse an unknown direction or support, a temperature or block_size <= 0."""
    if rule.direction not in ("forward", "reverse"):
        raise ValueError(
            f"{where}: direction: got {rule.direction!r}; expected forward or reverse"
        )
    if rule.support not in ("vocabulary", "top_k"):
        raise ValueError(
            f"{where}: support: got {rule.support!r}; expected vocabulary or top_k"
        )
    if not 0 < rule.temperature < float("inf"):
        raise ValueError(
            f"{where}: temperature: got {rule.temperature}; expected a number > 0"
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"{where}: block_size: got {block_size}; expected >= 1")
