"""The packing plan: what is in it, for any lengths."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.data.plan import (
    REPLAY,
    SFT,
    as_plan,
    best_fit,
    copies_per_epoch,
    cut_text,
    make_plan,
    plan_digest,
)

W = 32
lengths = st.lists(st.integers(1, W), min_size=1, max_size=40)
texts = st.lists(st.integers(1, 4 * W), min_size=1, max_size=20)


def plan_of(sft, replay=(), *, n=30, sources=None, **changes):
    sources = np.zeros(len(sft), np.int64) if sources is None else np.array(sources)
    setting = {"window": W, "replay_share": 0.1, "balance": 1.0, "seed": 0} | changes
    return make_plan(
        sft_lengths=np.array(sft, np.int64),
        sft_sources=sources,
        replay_lengths=np.array(replay, np.int64),
        n_windows=n,
        **setting,
    )


def windows_of(plan, stream=None):
    windows = [plan.window(i) for i in range(plan.n_windows)]
    return [[tuple(map(int, s)) for s in w] for k, w in windows if stream in (None, k)]


def sizes(plan):
    return [sum(b - a for _, a, b in w) for w in windows_of(plan)]


@given(lengths, texts, st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_windows_are_never_empty_nor_too_full(sft, replay, share, seed):
    plan = plan_of(sft, replay, replay_share=share, seed=seed)

    assert plan.n_windows == 30
    assert all(0 < size <= W for size in sizes(plan))
    for stream, known in ((SFT, sft), (REPLAY, replay)):
        for document, start, stop in chain(*windows_of(plan, stream)):
            assert 0 <= start < stop <= known[document]


@given(lengths, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_document_whole_and_once_an_epoch(sft, seed):
    windows = windows_of(plan_of(sft, n=200, seed=seed))

    seen, left = [], Counter(range(len(sft)))
    epochs = 0
    for window in windows:
        for document, start, stop in window:
            assert (start, stop) == (0, sft[document])
            seen.append(document)
            left[document] -= 1
        assert min(left.values()) >= 0, "a document came twice in one epoch"
        if not any(left.values()):
            epochs, left = epochs + 1, Counter(range(len(sft)))
    assert epochs >= 200 // len(sft)
    # Epochs differ in order once there is more than one order.
    if len(sft) >= 10 and epochs >= 2:
        assert seen[: len(sft)] != seen[len(sft) : 2 * len(sft)]


@given(lengths)
@settings(max_examples=60, deadline=None)
def test_best_fit_leaves_no_two_windows_that_fit_into_one_half(sft):
    packed = best_fit(range(len(sft)), np.array(sft), W)

    filled = [sum(b - a for _, a, b in w) for w in packed]
    assert sum(filled) == sum(sft)
    assert sum(size <= W // 2 for size in filled) <= 1


@given(texts, st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_text_is_cut_without_loss_and_only_the_last_window_has_room(replay, window):
    cut = list(cut_text(range(len(replay)), np.array(replay), window))

    sizes = [sum(b - a for _, a, b in w) for w in cut]
    assert sizes[:-1] == [window] * (len(sizes) - 1)
    at = Counter()
    for document, start, stop in chain(*cut):
        assert at[document] == start
        at[document] = stop
    assert [at[d] for d in range(len(replay))] == replay


def test_b037_all_tokens_kept_and_padding_only_in_the_last_window():
    documents = np.arange(10, 20)

    cut = list(cut_text(range(10), documents, 7))

    sizes = [sum(b - a for _, a, b in w) for w in cut]
    assert sum(sizes) == 145
    assert sizes == [7] * 20 + [5]


@given(lengths, texts, st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_the_mix_is_exact_to_a_window_at_every_moment(sft, replay, share):
    plan = plan_of(sft, replay, replay_share=share, n=60)

    size = np.array(sizes(plan))
    replayed = np.cumsum(size * (plan.streams == REPLAY))
    assert (abs(replayed - share * np.cumsum(size)) <= W).all()


def test_the_mix_counts_tokens_not_documents():
    """200-token answers and 1000-token texts, 9:1: not 36 % replay."""
    plan = plan_of([200] * 381, [1000] * 40, window=1024, n=400)

    tokens = np.array(sizes(plan))
    assert tokens[plan.streams == REPLAY].sum() / tokens.sum() == pytest.approx(
        0.1, abs=0.002
    )


@given(lengths, texts, st.integers(1, 60), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_longer_plan_begins_with_the_shorter_one(sft, replay, n, seed):
    sources = [i % 3 for i in range(len(sft))]
    plans = [
        plan_of(sft, replay, n=m, sources=sources, balance=0.3, seed=seed)
        for m in (n, 60)
    ]

    assert windows_of(plans[0]) == windows_of(plans[1])[:n]


def test_the_seed_decides_every_order():
    sft, replay = [5] * 50, [40] * 20

    same, other = plan_of(sft, replay, seed=1), plan_of(sft, replay, seed=2)

    assert windows_of(same) == windows_of(plan_of(sft, replay, seed=1))
    assert windows_of(same) != windows_of(other)


def test_b042_the_second_epoch_has_an_order_of_its_own():
    windows = windows_of(plan_of([W] * 10, n=20))

    order = [w[0][0] for w in windows]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


def test_b041_three_epochs_are_three_times_every_document():
    plan = plan_of([W] * 16, n=3 * 16)

    seen = Counter(d for w in windows_of(plan) for d, _, _ in w)
    assert seen == Counter(dict.fromkeys(range(16), 3))


@pytest.mark.parametrize(("balance", "shares"), [(1.0, 0.1), (0.5, 0.25), (0.0, 0.5)])
def test_balance_sets_the_shares_of_categories(balance, shares):
    """Tokens 1:9; the square roots are 1:3."""
    sft, sources = [8] * 100, [0] * 10 + [1] * 90

    copies = copies_per_epoch(np.array(sft), np.array(sources), balance)
    plan = plan_of(sft, n=400, sources=sources, balance=balance)

    assert copies[1] == 1
    tokens = Counter()
    for document, start, stop in chain(*windows_of(plan)):
        tokens[sources[document]] += stop - start
    assert tokens[0] / sum(tokens.values()) == pytest.approx(shares, abs=0.02)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_no_document_is_left_out_or_preferred_by_balancing(sources, balance):
    """Each is seen at least once an epoch; within a category the counts are even."""
    sources = np.unique(sources, return_inverse=True)[1]
    sft = np.full(len(sources), W)
    copies = copies_per_epoch(sft, sources, balance)
    epochs = 4
    per_epoch = (copies[sources]).sum()
    n = int(np.floor(per_epoch * epochs)) + len(sources)

    plan = plan_of(sft, n=n, sources=sources, balance=balance)

    seen = Counter(d for w in windows_of(plan) for d, _, _ in w)
    for category in np.unique(sources):
        counts = [seen[int(d)] for d in np.flatnonzero(sources == category)]
        assert min(counts) >= epochs - 1
        assert max(counts) - min(counts) <= 1 + np.ceil(copies[category])


def test_one_stream_alone():
    assert set(plan_of([], [50] * 3).streams) == {REPLAY}
    assert set(plan_of([5] * 3).streams) == {SFT}
    assert set(plan_of([5] * 3, [50] * 3, replay_share=0.0).streams) == {SFT}
    assert plan_of([], []).n_windows == 0
    assert plan_of([5], n=0).n_windows == 0


def test_a_plan_of_windows_gives_them_back():
    windows = [(SFT, [(0, 0, 3)]), (REPLAY, [(1, 2, 5), (0, 0, 1)])]

    plan = as_plan(windows)

    assert windows_of(plan) == [spans for _, spans in windows]
    assert plan.streams.tolist() == [SFT, REPLAY]


def test_the_digest_is_of_the_settings():
    assert plan_digest({"a": 1, "b": [2]}) == plan_digest({"b": [2], "a": 1})
    assert plan_digest({"a": 1}) != plan_digest({"a": 2})
