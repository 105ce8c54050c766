"""Mean loss over fixed windows, exactly weighted by tokens."""

from collections.abc import Callable, Mapping, Sequence

from bitmamba.train.metrics import (
    LossSums,
    category_losses,
    loss_sums,
    mean_loss,
    total_sums,
)
from bitmamba.train.step import LossFn
from bitmamba.types import Batch, Params


def make_eval_step(
    loss_fn: LossFn, *, n_categories: int
) -> Callable[[Params, Params, Batch], LossSums]:
    """Build eval_step(trainable, frozen, batch (B, L)) -> LossSums, to be jitted."""

    def eval_step(trainable, frozen, batch):
        return loss_sums(loss_fn(trainable, frozen, batch), batch, n_categories)

    return eval_step


def evaluate(
    eval_step: Callable[[Params, Params, Batch], LossSums],
    trainable: Params,
    frozen: Params,
    batches: Sequence[Batch],
    *,
    n_categories: int,
) -> LossSums:
    """Sum over all batches, in float64; finite with any mix of empty rows."""
    sums = [eval_step(trainable, frozen, batch) for batch in batches]
    return total_sums(sums, n_categories)


def held_out_losses(
    eval_step: Callable[[Params, Params, Batch], LossSums],
    trainable: Params,
    frozen: Params,
    *,
    examples: Sequence[Batch],
    text: Sequence[Batch],
    categories: Sequence[str],
) -> dict[str, float]:
    """The numbers of an evaluation row.

    Args:
        eval_step: see `make_eval_step`, jitted.
        trainable, frozen: the parameters.
        examples: windows of held-out examples; without any, `text` stands in.
        text: windows of held-out replay text; may be empty.
        categories: names by `Batch.source_ids`.

    Returns:
        "eval/loss", "eval/<category>/loss" and, with text, "retention/loss"; if the
        text has several categories, "retention/<category>/loss" too.
    """
    n = len(categories)
    results = {}
    if text:
        sums = evaluate(eval_step, trainable, frozen, text, n_categories=n)
        results["retention/loss"] = mean_loss(sums)
        by_category = category_losses(sums, categories)
        if len(by_category) > 1:
            results |= {f"retention/{k}/loss": v for k, v in by_category.items()}
    if examples:
        sums = evaluate(eval_step, trainable, frozen, examples, n_categories=n)
    if examples or text:
        results["eval/loss"] = mean_loss(sums)
        by_category = category_losses(sums, categories)
        results |= {f"eval/{k}/loss": v for k, v in by_category.items()}
    return results


def against_base(
    now: Mapping[str, float], base: Mapping[str, float]
) -> dict[str, float]:
    """What was known before the first step: "<name>/base_loss" for each "<name>/loss".

    Args:
        now, base: from `held_out_losses`; names that the base lacks are left out.
    """
    return {
        f"{name.removesuffix('/loss')}/base_loss": base[name]
        for name in now
        if name in base
    }
