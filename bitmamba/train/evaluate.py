"""Mean loss over fixed windows, exactly weighted by tokens."""

from collections.abc import Callable, Sequence

from bitmamba.train.metrics import LossSums, loss_sums, total_sums
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
