"""Plan to batches: shifting, masks, segments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.data.encode import Encoded
from bitmamba.data.plan import SFT, as_plan
from bitmamba.data.store import StoreBuilder
from bitmamba.data.windows import empty_batch, make_windows, rows_of_process


def store_of(documents, masks=None, sources=None):
    builder = StoreBuilder(vocab_size=1000)
    for i, tokens in enumerate(documents):
        mask = [1.0] * len(tokens) if masks is None else masks[i]
        builder.add(
            Encoded(np.array(tokens, np.int32), np.array(mask, np.float32)),
            0 if sources is None else sources[i],
        )
    return builder.build()


def packed(documents, *, window, masks=None, sources=None):
    """All documents in one window."""
    plan = as_plan([(SFT, [(i, 0, len(d)) for i, d in enumerate(documents)])])
    store = store_of(documents, masks, sources)
    return make_windows(plan, [store], [0], window=window)


def pairs(batch):
    """[(token, target, weight)] where there is loss."""
    where = batch.loss_weights > 0
    fields = (batch.tokens, batch.targets, batch.loss_weights)
    return list(zip(*(f[where].tolist() for f in fields), strict=True))


def test_a_window_written_out():
    batch = packed(
        [[11, 12, 13], [21, 22]], window=7, masks=[[0, 0, 1], [0, 0.5]], sources=[4, 2]
    )

    assert batch.tokens.tolist() == [[11, 12, 13, 21, 22, 0, 0]]
    assert batch.targets.tolist() == [[12, 13, 0, 22, 0, 0, 0]]
    assert batch.loss_weights.tolist() == [[0, 1, 0, 0.5, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert batch.source_ids.tolist() == [[4, 4, 4, 2, 2, 0, 0]]
    for name, field in batch._asdict().items():
        kind = np.float32 if name == "loss_weights" else np.int32
        assert field.dtype == kind, name


def test_b033_the_last_token_of_a_document_predicts_nothing():
    batch = packed([[1, 2, 3], [7, 8]], window=5)

    assert pairs(batch) == [(1, 2, 1.0), (2, 3, 1.0), (7, 8, 1.0)]


def test_b027_padding_is_no_target():
    batch = packed([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], window=64)

    assert batch.loss_weights[:, 10:].sum() == 0
    assert batch.targets[:, 10:].sum() == 0
    assert batch.segment_ids[:, 10:].sum() == 0
    assert batch.loss_weights.sum() == 8


def test_b031_documents_of_one_token_keep_their_own_segment():
    batch = packed([[1, 2, 3, 4, 5], [6], [7], [8, 9, 10, 11]], window=11)

    assert batch.segment_ids.tolist() == [[1] * 5 + [2, 3] + [4] * 4]
    assert pairs(batch) == [
        (a, b, 1.0) for a, b in [(1, 2), (2, 3), (3, 4), (4, 5)]
    ] + [(8, 9, 1.0), (9, 10, 1.0), (10, 11, 1.0)]


documents = st.lists(
    st.lists(st.integers(1, 999), min_size=1, max_size=9), min_size=1, max_size=6
)


@given(documents, st.integers(0, 5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_b036_packed_pairs_are_those_of_the_documents_alone(docs, room, random):
    masks = [[random.choice([0.0, 0.5, 1.0]) for _ in d] for d in docs]
    window = sum(map(len, docs)) + room

    together = pairs(packed(docs, window=window, masks=masks))
    alone = [
        pair
        for d, m in zip(docs, masks, strict=True)
        for pair in pairs(packed([d], window=len(d), masks=[m]))
    ]

    assert together == alone


def test_own_4_weights_are_floats_whatever_the_first_document_has():
    batch = packed([[1, 2, 3], [4, 5, 6]], window=6, masks=[[1, 1, 1], [0, 0.25, 0.5]])

    assert pairs(batch)[2:] == [(4, 5, 0.25), (5, 6, 0.5)]


def test_a_piece_of_a_document_starts_at_position_0_and_ends_without_a_target():
    store = store_of([[1, 2, 3, 4, 5]])
    plan = as_plan([(SFT, [(0, 0, 2)]), (SFT, [(0, 2, 5)])])

    batch = make_windows(plan, [store], [0, 1], window=3)

    assert batch.tokens.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert batch.targets.tolist() == [[2, 0, 0], [4, 5, 0]]
    assert batch.positions.tolist() == [[0, 1, 0], [0, 1, 2]]


def test_index_minus_one_is_an_empty_window():
    store = store_of([[1, 2, 3]])
    plan = as_plan([(SFT, [(0, 0, 3)])])

    batch = make_windows(plan, [store], [0, -1], window=3)

    assert batch.segment_ids.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert batch.loss_weights[1].sum() == 0


@pytest.mark.parametrize("vocab_size", [1000, 2**16, 2**16 + 1])
def test_token_ids_survive_the_store(vocab_size):
    builder = StoreBuilder(vocab_size=vocab_size)
    tokens = np.array([0, vocab_size - 1], np.int32)
    builder.add(Encoded(tokens, np.ones(2, np.float32)), 0)

    store = builder.build()

    assert store.tokens.tolist() == tokens.tolist()
    assert store.weights is None


def test_the_digest_of_a_store_is_of_its_contents():
    digests = {
        store_of([[1, 2], [3]]).digest(),
        store_of([[1], [2, 3]]).digest(),
        store_of([[1, 2], [4]]).digest(),
        store_of([[1, 2], [3]], sources=[0, 1]).digest(),
        store_of([[1, 2], [3]], masks=[[1, 0.5], [1]]).digest(),
    }

    assert len(digests) == 5
    assert store_of([[1, 2], [3]]).digest() in digests


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_b047_b048_processes_together_see_the_global_batch(count):
    batch = empty_batch((2, 8, 3))
    batch.tokens[:] = np.arange(48).reshape(2, 8, 3)

    parts = [rows_of_process(batch, index=i, count=count) for i in range(count)]

    joined = np.concatenate([p.tokens for p in parts], axis=1)
    assert np.array_equal(joined, batch.tokens)
    with pytest.raises(ValueError, match="got 8 for 3 processes"):
        rows_of_process(batch, index=0, count=3)
