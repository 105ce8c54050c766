"""Distillation from a teacher's stored top-k logits."""

import jax

from bitmamba.losses.feature_kl import (
    Fixed,
    check_entries,
    check_features,
    feature_kl,
)
from bitmamba.losses.kl import Rule, Support, check_choices


def distillation(
    hidden: jax.Array,
    head: jax.Array,
    teacher_ids: jax.Array,
    teacher_logits: jax.Array,
    *,
    temperature: float = 1.0,
    support: Support = "vocabulary",
    block_size: int | None = None,
) -> jax.Array:
    """Per-token KL(teacher || student) over the teacher's stored entries.

    value_t = τ² sum_k p_k log(p_k / q_k), p = softmax(teacher_logits / τ) over the k
    stored entries alone, q = softmax(hidden @ head / τ). By the student's logits z:
    d/dz_v = τ (q_v - p_v), with p_v = 0 where nothing is stored. The factor τ² keeps
    gradients of one size while τ varies (Hinton et al. 2015, arXiv 1503.02531, 2.1).

    Args:
        hidden: (..., D) float. The student's features after the final norm.
        head: (D, V) float, of hidden's dtype.
        teacher_ids: (..., K) int32, distinct; padding has logit -inf and any id.
        teacher_logits: (..., K) float.
        temperature: τ > 0, dimensionless.
        support: what q is over: the whole "vocabulary", so that the student learns
            also that the rest is unlikely (the teacher's own tail counts as 0), or
            the "top_k" entries, which teaches their odds only.
        block_size: positions (along the last token axis) whose logits are formed at a
            time; None chooses so that a block holds at most MAX_BLOCK_LOGITS logits,
            the teacher's spread over the vocabulary included.

    Returns:
        (...) float32, one value a token; >= 0. A token with no stored entry gives 0
        and no gradient; one with an id outside [0, V) gives NaN.

    Raises:
        ValueError: shapes disagree, an unknown support, temperature <= 0, or
            block_size < 1.

    Numerics: products accumulate in float32 (float64 for float64 input); finite for
        any finite logits, see `kl.row_kl`.
    Gradient: to hidden and head, of their dtypes; none to the teacher.
    """
    rule = Rule(temperature=float(temperature), support=support)
    check_choices("distillation", rule, block_size)
    tokens = hidden.shape[:-1]
    check_features("distillation", "", hidden, head, tokens, head.shape[1])
    check_entries("distillation", "teacher_", teacher_ids, teacher_logits, tokens)
    fixed = Fixed(ids=teacher_ids, logits=teacher_logits)
    return feature_kl(
        hidden, head, fixed, fixed_head=None, rule=rule, block_size=block_size
    )
