"""The largest logits, in blocks: against a sort in float64."""

import numpy as np
import pytest

from bitmamba.losses import top_k_logits


def make(dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 7, 5))
    head = rng.standard_normal((5, 11))
    return hidden.astype(dtype), head.astype(dtype)


@pytest.mark.parametrize("block_size", [None, 1, 3, 7])
def test_they_are_the_largest_in_order(block_size):
    hidden, head = make()
    logits = np.float64(hidden) @ np.float64(head)

    ids, found = top_k_logits(hidden, head, 4, block_size=block_size)

    expected = np.argsort(-logits, axis=-1)[..., :4]
    assert np.array_equal(ids, expected)
    assert ids.dtype == np.int32
    assert found.dtype == np.float32
    largest = np.take_along_axis(logits, expected, -1)
    assert np.abs(found - largest).max() < 1e-6


def test_all_of_them_are_a_permutation():
    hidden, head = make()

    ids, _ = top_k_logits(hidden, head, 11)

    assert np.array_equal(np.sort(ids, -1), np.broadcast_to(np.arange(11), (2, 7, 11)))


@pytest.mark.parametrize(
    ("k", "block_size", "message"),
    [
        (0, None, r"k: got 0; expected 1 to 11, the vocabulary"),
        (12, None, r"k: got 12; expected 1 to 11, the vocabulary"),
        (2, 0, r"block_size: got 0; expected at least 1"),
    ],
)
def test_mistakes_are_told(k, block_size, message):
    with pytest.raises(ValueError, match=message):
        top_k_logits(*make(), k, block_size=block_size)
