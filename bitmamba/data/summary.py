"""The numbers of a plan: what the run will see of each category."""

from collections.abc import Sequence

import numpy as np

from bitmamba.config import DataConfig
from bitmamba.data.account import CategoryAccount, DataAccount, FileAccount
from bitmamba.data.plan import REPLAY, SFT, Plan, copies_per_epoch
from bitmamba.data.store import DocumentStore


def make_account(
    files: Sequence[FileAccount],
    categories: tuple[str, ...],
    stores: dict[str, DocumentStore],
    plan: Plan,
    cfg: DataConfig,
    *,
    template: str,
    eval_windows: tuple[int, int],
) -> DataAccount:
    """Count, over the whole plan, tokens and trained tokens by category."""
    planned, trained = _planned(plan, (stores["sft"], stores["replay"]), categories)
    total = int(planned.sum())
    sft_tokens = total - int(planned[-1])
    return DataAccount(
        files=tuple(files),
        categories=_categories(categories, stores, cfg, planned, trained),
        window=cfg.window,
        windows=plan.n_windows,
        tokens=total,
        trained_tokens=int(trained.sum()),
        fill_share=total / max(1, plan.n_windows * cfg.window),
        epochs=sft_tokens / max(1.0, _epoch_tokens(stores["sft"], cfg)),
        replay_epochs=float(planned[-1] / max(1, stores["replay"].n_tokens)),
        replay_share_asked=cfg.replay_share if cfg.sft else 1.0,
        replay_share=float(planned[-1] / max(1, total)),
        eval_sft_windows=eval_windows[0],
        eval_replay_windows=eval_windows[1],
        template=template,
    )


def _planned(
    plan: Plan, stores: Sequence[DocumentStore], categories: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """(categories,) tokens, and tokens with loss, in the windows of the plan."""
    tokens = np.zeros(len(categories), np.int64)
    trained = np.zeros(len(categories), np.int64)
    stream_of_span = np.repeat(plan.streams, np.diff(plan.offsets))
    for stream in (SFT, REPLAY):
        store, spans = stores[stream], plan.spans[stream_of_span == stream]
        if not len(spans):
            continue
        source = store.sources[spans[:, 0]]
        np.add.at(tokens, source, spans[:, 2] - spans[:, 1])
        np.add.at(trained, source, store.n_trained(spans))
    return tokens, trained


def _epoch_tokens(store: DocumentStore, cfg: DataConfig) -> float:
    if not len(store.sources):
        return 0.0
    copies = copies_per_epoch(store.lengths, store.sources, cfg.balance)
    return float((store.lengths * copies[store.sources]).sum())


def _categories(
    names: tuple[str, ...],
    stores: dict[str, DocumentStore],
    cfg: DataConfig,
    planned: np.ndarray,
    trained: np.ndarray,
) -> tuple[CategoryAccount, ...]:
    def per_category(key: str, *, tokens: bool = False) -> np.ndarray:
        store = stores[key]
        weights = store.lengths if tokens else None
        return np.bincount(store.sources, weights=weights, minlength=len(names))

    documents = per_category("sft") + per_category("replay")
    held_out = per_category("sft_heldout") + per_category("heldout_replay")
    tokens = per_category("sft", tokens=True) + per_category("replay", tokens=True)
    copies = np.ones(len(names))
    if len(stores["sft"].sources):
        some = copies_per_epoch(
            stores["sft"].lengths, stores["sft"].sources, cfg.balance
        )
        copies[: len(some)] = some
    return tuple(
        CategoryAccount(
            name=name,
            documents=int(documents[i]),
            held_out=int(held_out[i]),
            tokens=int(tokens[i]),
            copies=float(copies[i]),
            planned_tokens=int(planned[i]),
            planned_share=float(planned[i] / max(1, planned.sum())),
            trained_tokens=int(trained[i]),
        )
        for i, name in enumerate(names)
    )
