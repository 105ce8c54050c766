"""Codes of a weight that trains: at a byte and packed they are `ternarise`'s."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.quant.latent import CodedLatent, make_codes
from bitmamba.quant.ternary import ternarise


@pytest.mark.parametrize("packed", [False, True], ids=["int8", "packed"])
@pytest.mark.parametrize("n_rows", [1, 4, 7, 8])
def test_codes_come_back_as_they_were(n_rows, packed):
    w = np.random.default_rng(n_rows).standard_normal((n_rows, 5)).astype(np.float32)

    made = jax.jit(lambda w: make_codes(w, packed=packed))(w)
    back = CodedLatent(w, made).weight()

    codes, scale = ternarise(jnp.asarray(w))
    assert back.codes.dtype == jnp.int8
    assert np.array_equal(back.codes, codes)
    assert set(np.unique(codes)) <= {-1, 0, 1}
    assert back.scale == scale


def test_packed_codes_take_a_quarter_of_the_bytes():
    w = jnp.ones((64, 12))

    assert make_codes(w, packed=True).stored.nbytes == 64 * 12 // 4
    assert make_codes(w, packed=False).stored.nbytes == 64 * 12


def test_no_code_is_three():
    w = jnp.asarray(np.random.default_rng(0).standard_normal((6, 9)), jnp.float32)

    stored = np.asarray(make_codes(w, packed=True).stored)

    for shift in (0, 2, 4, 6):
        assert ((stored >> shift) & 3 < 3).all()
