"""Mean loss over fixed windows, exactly weighted by tokens."""

from collections.abc import Callable, Sequence

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
        "eval/loss", "eval/<category>/loss" and, with text, "retention/loss".
    """
    n = len(categories)
    results = {}
    if text:
        sums = evaluate(eval_step, trainable, frozen, text, n_categories=n)
        results["retention/loss"] = mean_loss(sums)
    if examples:
        sums = evaluate(eval_step, trainable, frozen, examples, n_categories=n)
    if examples or text:
        results["eval/loss"] = mean_loss(sums)
        by_category = category_losses(sums, categories)
        results |= {f"eval/{k}/loss": v for k, v in by_category.items()}
    return results
