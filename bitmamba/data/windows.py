"""Plan and tokens to `Batch`: pure functions of numpy arrays."""

from collections.abc import Sequence

import numpy as np

from bitmamba.data.plan import Plan
from bitmamba.data.store import DocumentStore
from bitmamba.types import Batch


def make_windows(
    plan: Plan,
    stores: Sequence[DocumentStore],
    indices: Sequence[int],
    *,
    window: int,
) -> Batch:
    """Serve some windows of a plan.

    Args:
        plan: the plan.
        stores: the store of each stream, as `plan.streams` numbers them.
        indices: which windows; -1 is an empty one.
        window: tokens in a window, L.

    Returns:
        Batch with (len(indices), L) fields. Targets are shifted inside each
        document, so none crosses from one to the next; the last token of a document
        has none, and its loss weight is 0.
    """
    batch = empty_batch((len(indices), window))
    for row, index in enumerate(indices):
        if index >= 0:
            _fill_row(batch, row, *plan.window(index), stores)
    return batch


def empty_batch(shape: tuple[int, ...]) -> Batch:
    """All padding."""
    integers = [np.zeros(shape, np.int32) for _ in range(5)]
    tokens, targets, segment_ids, positions, source_ids = integers
    weights = np.zeros(shape, np.float32)
    return Batch(tokens, targets, weights, segment_ids, positions, source_ids)


def _fill_row(
    batch: Batch,
    row: int,
    stream: int,
    spans: np.ndarray,
    stores: Sequence[DocumentStore],
) -> None:
    store, at = stores[stream], 0
    for segment, (document, first, end) in enumerate(spans, start=1):
        tokens, weights = store.span(document, first, end)
        n = len(tokens)
        to = slice(at, at + n)
        batch.tokens[row, to] = tokens
        batch.segment_ids[row, to] = segment
        batch.positions[row, to] = np.arange(n)
        batch.source_ids[row, to] = store.sources[document]
        shifted = slice(at, at + n - 1)
        batch.targets[row, shifted] = tokens[1:]
        batch.loss_weights[row, shifted] = weights[1:]
        at += n


def rows_of_process(batch: Batch, *, index: int, count: int) -> Batch:
    """The rows of a global batch that one process of several feeds.

    Args:
        batch: (M, B, L) fields; every process builds the same one.
        index, count: which process, of how many.

    Returns:
        Batch with (M, B / count, L) fields; together, in order, they are the batch.

    Raises:
        ValueError: B is not a multiple of count.
    """
    part = process_rows(batch.tokens.shape[1], index, count)
    return Batch(*(field[:, part] for field in batch))


def process_rows(rows: int, index: int, count: int) -> slice:
    """Which of a global batch's rows are a process's; errors as `rows_of_process`."""
    if rows % count:
        raise ValueError(
            f"train.batch_size: got {rows} for {count} processes; expected a multiple "
            "of the number of processes"
        )
    return slice(index * rows // count, (index + 1) * rows // count)
