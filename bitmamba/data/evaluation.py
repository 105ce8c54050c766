"""Held-out windows: the same rows, packed the same way, at every evaluation."""

from collections.abc import Sequence

import numpy as np

from bitmamba.data.plan import SFT, as_plan, best_fit, cut_text
from bitmamba.data.store import TokenStore
from bitmamba.data.windows import make_windows
from bitmamba.types import Batch


def eval_sft_windows(
    store: TokenStore, *, window: int, batch_size: int, max_windows: int
) -> tuple[list[Batch], int]:
    """Held-out examples, packed whole, each once.

    Args:
        store: held-out documents.
        window, batch_size: shape of the batches, (B, L); the last is filled up with
            empty windows, so that all have one shape.
        max_windows: take at most so many, a fair sample of them.

    Returns:
        The batches and the number of windows that are not empty.
    """
    # A fixed order, mixed: a limit then keeps some of every category.
    rng = np.random.Generator(np.random.PCG64(0))
    order = rng.permutation(len(store.sources))
    windows = best_fit(order, store.lengths, window)
    return _batches(windows[:max_windows], store, window, batch_size)


def eval_replay_windows(
    store: TokenStore, *, window: int, batch_size: int, max_windows: int
) -> tuple[list[Batch], int]:
    """Held-out text in file order, cut at the windows; beyond the limit, every n-th.

    Arguments and result as for `eval_sft_windows`.
    """
    windows = list(cut_text(range(len(store.sources)), store.lengths, window))
    if len(windows) > max_windows:
        chosen = np.linspace(0, len(windows) - 1, max_windows).round().astype(int)
        windows = [windows[i] for i in chosen]
    return _batches(windows, store, window, batch_size)


def _batches(
    windows: Sequence, store: TokenStore, window: int, batch_size: int
) -> tuple[list[Batch], int]:
    plan = as_plan((SFT, spans) for spans in windows)
    n = plan.n_windows
    made = []
    for start in range(0, n, batch_size):
        indices = [i if i < n else -1 for i in range(start, start + batch_size)]
        made.append(make_windows(plan, [store], indices, window=window))
    return made, n
