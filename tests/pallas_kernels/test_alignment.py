"""Pieces of arrays that TMA copies."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import alignment, backend


@pytest.mark.parametrize(
    ("sizes", "itemsize", "width"),
    [
        ([4096, 8512], 2, 64),
        ([4096, 8288], 2, 32),  # bitmamba2_1b's in_proj
        ([4096, 48], 2, 16),
        ([4096, 40], 2, None),
        ([8288], 1, 32),
        ([48], 1, None),
    ],
)
def test_pieces_are_the_widest_that_fit_all(sizes, itemsize, width):
    assert alignment.columns_at_once(sizes, itemsize) == width


def test_arrays_are_padded_with_zeros_where_need_be():
    t = jnp.ones((3, 5))

    assert alignment.padded(t, 3, 5) is t
    whole = alignment.padded(t, alignment.rounded(3, 8), 5)
    np.testing.assert_array_equal(whole, np.r_[np.ones((3, 5)), np.zeros((5, 5))])


@pytest.mark.parametrize(
    ("capability", "by_tma"), [((8, 9), False), ((9, 0), True), (None, False)]
)
def test_tma_is_for_hopper_and_later(monkeypatch, capability, by_tma):
    monkeypatch.setattr(backend, "capability", lambda: capability)

    assert alignment.copies_by_tma() == by_tma
