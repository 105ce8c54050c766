"""Target-masked KL: hold the adapted model to the base, except for the target.

p', q' are the base and the adapted distribution, both without the target and
renormalised. Raising the target's own probability therefore costs nothing; shifting
the odds among the other tokens does.
    forward (default): KL(p' || q');  d/dz_v = q'_v - p'_v
    reverse: KL(q' || p');  d/dz_v = q'_v (log(q'_v / p'_v) - KL)
for v other than the target and 0 at the target; the gradient adds up to 0.

Source: arXiv 2605.29498. Differs: q is renormalised without the target as well as p;
with p alone renormalised, q_v - p'_v is not the gradient of any such divergence.

Three ways in: `tmkl_loss_and_gradient` from logits, for use outside a graph; `tmkl`
from features, for the training step; `tmkl_topk` from features and stored base logits.
"""

import functools

import jax
import jax.numpy as jnp

from bitmamba.losses.feature_kl import (
    Fixed,
    check_entries,
    check_features,
    feature_kl,
    positions_per_block,
)
from bitmamba.losses.kl import (
    Direction,
    Rule,
    Support,
    accumulator,
    check_choices,
    map_positions,
    row_kl,
)


def tmkl_loss_and_gradient(
    base_logits: jax.Array,
    adapted_logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    direction: Direction = "forward",
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weighted mean of the target-masked KL and its exact gradient.

    loss = sum_t weights_t KL_t / sum_t weights_t, and 0 if the weights add up to 0.

    Args:
        base_logits, adapted_logits: (..., V) float, finite or -inf.
        targets: (...) int32 in [0, V).
        weights: (...) float, >= 0. A token of weight 0 has no effect, NaN or not.
        direction: "forward" KL(p' || q') or "reverse" KL(q' || p').
        block_size: positions (along the last token axis) computed at a time; None
            chooses so that a block holds at most MAX_BLOCK_LOGITS logits.

    Returns:
        loss () float32 (float64 for float64 logits) and gradient (..., V) by
        adapted_logits, in their dtype.

    Raises:
        ValueError: shapes disagree, an unknown direction, or block_size < 1.

    Numerics: float32, of one block at a time (jax 0.10 on the CPU alone widens
        bfloat16 logits whole before the loop). A logit of -inf is a forbidden token:
        forbidden in both models, it plays no part; in one of them only, its
        log-probability counts as -1e30, so that the divergence (infinite) stays
        finite: huge, if the other model gives it probability. Nothing finite beside
        the target: 0 and a zero gradient. See `kl.row_kl`.
    """
    rule = Rule(direction=direction)
    check_choices("tmkl_loss_and_gradient", rule, block_size)
    tokens = base_logits.shape[:-1]
    same = base_logits.shape == adapted_logits.shape
    if not same or targets.shape != tokens or weights.shape != tokens:
        raise ValueError(
            f"tmkl_loss_and_gradient: got base_logits {base_logits.shape}, "
            f"adapted_logits {adapted_logits.shape}, targets {targets.shape}, weights "
            f"{weights.shape}; expected (..., V), (..., V), (...), (...)"
        )
    if block_size is None:
        block_size = positions_per_block(tokens, base_logits.shape[-1], models=2)
    arrays = (base_logits, adapted_logits, targets, weights)
    if not tokens:  # one token without an axis
        loss, gradient = _loss_and_gradient(
            *(jnp.asarray(a)[None] for a in arrays), rule, block_size
        )
        return loss, gradient[0]
    return _loss_and_gradient(*arrays, rule, block_size)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _loss_and_gradient(base_logits, adapted_logits, targets, weights, rule, block_size):
    dtype = accumulator(adapted_logits.dtype)
    weights = weights.astype(dtype)
    total = weights.sum()
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)

    def rows(block):
        base, adapted, target, share = block
        others = jnp.arange(base.shape[-1]) != target[..., None]
        kl, gradient = row_kl(base.astype(dtype), adapted.astype(dtype), others, rule)
        used = share != 0
        gradient = jnp.where(used[..., None], gradient * share[..., None], 0)
        return jnp.where(used, kl * share, 0), gradient.astype(adapted.dtype)

    kl, gradient = map_positions(
        rows,
        (base_logits, adapted_logits, targets, shares),
        axis=targets.ndim - 1,
        block_size=block_size,
    )
    return kl.sum(), gradient


def tmkl(
    hidden: jax.Array,
    head: jax.Array,
    base_hidden: jax.Array,
    base_head: jax.Array,
    targets: jax.Array,
    *,
    direction: Direction = "forward",
    block_size: int | None = None,
) -> jax.Array:
    """Per-token target-masked KL from the features of both models.

    Args:
        hidden, head: (..., D) and (D, V) float. The adapted model's features.
        base_hidden, base_head: (..., E) and (E, V) float. The base's: constants.
        targets: (...) int32 in [0, V).
        direction: "forward" KL(p' || q') or "reverse" KL(q' || p').
        block_size: positions (along the last token axis) whose logits are formed at a
            time; None chooses so that a block holds at most MAX_BLOCK_LOGITS logits
            of both models together (and at least one position).

    Returns:
        (...) float32, one value a token; >= 0, and 0 where the features are equal.

    Raises:
        ValueError: shapes disagree, an unknown direction, or block_size < 1.

    Numerics: products accumulate in float32 (float64 for float64 input); then as
        `tmkl_loss_and_gradient`.
    Gradient: to hidden and head, of their dtypes; none to the base. See
        `feature_kl.py`: a frozen head costs no more than 3 products.
    """
    rule = Rule(direction=direction)
    check_choices("tmkl", rule, block_size)
    tokens, vocab_size = targets.shape, head.shape[1]
    for name, rows, columns in (
        ("", hidden, head),
        ("base_", base_hidden, base_head),
    ):
        check_features("tmkl", name, rows, columns, tokens, vocab_size)
    fixed = Fixed(targets=targets, hidden=base_hidden)
    return feature_kl(
        hidden, head, fixed, fixed_head=base_head, rule=rule, block_size=block_size
    )


def tmkl_topk(
    hidden: jax.Array,
    head: jax.Array,
    base_ids: jax.Array,
    base_logits: jax.Array,
    targets: jax.Array,
    *,
    direction: Direction = "forward",
    support: Support = "top_k",
    block_size: int | None = None,
) -> jax.Array:
    """Per-token target-masked KL against the base's stored top-k logits.

    p' is the base over its stored entries without the target. With k = V this is
    `tmkl`, whatever the support.

    Args:
        hidden, head: (..., D) and (D, V) float. The adapted model's features.
        base_ids: (..., K) int32, distinct; padding has logit -inf and any id.
        base_logits: (..., K) float.
        targets: (...) int32 in [0, V).
        direction: "forward" KL(p' || q') or "reverse" KL(q' || p').
        support: what q' is over, besides leaving out the target: "top_k", the stored
            entries, so that an unchanged model gives 0 and no gradient, and the rest
            of the vocabulary is left alone; or "vocabulary", all of it, which pulls
            the probability of the rest, the unchanged model's too, towards 0.
        block_size: as for `tmkl`.

    Returns:
        (...) float32, one value a token; >= 0. NaN where an id is outside [0, V).

    Raises:
        ValueError: shapes disagree, an unknown choice, block_size < 1, or "reverse"
            over the vocabulary, which is infinite.

    Numerics, Gradient: as for `tmkl`.
    """
    rule = Rule(direction=direction, support=support)
    check_choices("tmkl_topk", rule, block_size)
    if direction == "reverse" and support == "vocabulary":
        raise ValueError(
            "tmkl_topk: support: got vocabulary with direction reverse; that "
            "divergence is infinite outside the stored entries; use top_k or forward"
        )
    tokens = targets.shape
    check_features("tmkl_topk", "", hidden, head, tokens, head.shape[1])
    check_entries("tmkl_topk", "base_", base_ids, base_logits, tokens)
    fixed = Fixed(targets=targets, ids=base_ids, logits=base_logits)
    return feature_kl(
        hidden, head, fixed, fixed_head=None, rule=rule, block_size=block_size
    )
