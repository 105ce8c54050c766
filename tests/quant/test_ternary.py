import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmamba.quant.ternary import (
    latent_from_codes,
    pack_ternary,
    pack_tree,
    ternarise,
    unpack_ternary,
    unpack_tree,
)


@given(rows=st.integers(1, 4), n=st.integers(0, 13), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_packing_round_trips_any_length(rows, n, seed):
    codes = np.random.default_rng(seed).integers(-1, 2, (rows, n)).astype(np.int8)

    packed = pack_ternary(codes)

    assert packed.shape == (rows, -(-n // 4))
    assert np.array_equal(unpack_ternary(packed, n), codes)


def test_first_code_is_in_the_low_bits():
    packed = pack_ternary(np.array([-1, 0, 1, 1, 1]))

    assert packed.tolist() == [0b10_10_01_00, 0b01_01_01_10]


def test_bad_codes_are_refused():
    with pytest.raises(ValueError, match=r"got values in \[0, 2\]"):
        pack_ternary(np.array([0, 2]))
    with pytest.raises(ValueError, match="got the code 3"):
        unpack_ternary(np.array([0b11], np.uint8), 1)
    with pytest.raises(ValueError, match="expected 2 for 5 codes"):
        unpack_ternary(np.array([0], np.uint8), 5)


def test_ternarise_by_hand():
    codes, scale = ternarise(np.array([[0.1, -0.2], [0.9, -0.8]], np.float32))

    assert float(scale) == pytest.approx(0.5)
    assert codes.tolist() == [[0, 0], [1, -1]]


def test_ternarise_equals_float64():
    w = np.random.default_rng(0).standard_normal((256, 1160)).astype(np.float32) * 0.05
    wide = w.astype(np.float64)

    codes, scale = ternarise(w)

    assert abs(float(scale) / np.abs(wide).mean() - 1) < 1e-6
    expected = np.clip(np.round(wide / np.abs(wide).mean()), -1, 1)
    assert np.mean(np.asarray(codes) != expected) < 1e-5


def test_all_zero_weights_stay_zero():
    codes, scale = ternarise(np.zeros((4, 4), np.float32))

    assert not np.asarray(codes).any()
    assert float(scale) == pytest.approx(1e-5)
    assert not latent_from_codes(codes, float(scale)).any()


@given(share=st.floats(0.01, 1.0), scale=st.floats(1e-4, 10.0), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_latent_weights_ternarise_to_the_same_codes_and_scale(share, scale, seed):
    rng = np.random.default_rng(seed)
    signs = rng.choice(np.array([-1, 1], np.int8), (40, 33))
    codes = np.where(rng.random((40, 33)) < share, signs, 0)
    codes[0, 0] = 1

    again, scale_again = ternarise(latent_from_codes(codes, scale))

    assert np.array_equal(again, codes)
    assert abs(float(scale_again) / scale - 1) < 1e-6


def test_a_tree_round_trips_through_names():
    rng = np.random.default_rng(0)
    flat = {
        "embed/embedding": rng.standard_normal((8, 6)).astype(np.float32),
        "layer_0/mixer/in_proj/kernel": rng.standard_normal((6, 7)).astype(np.float32),
        "layer_0/norm/scale": rng.standard_normal(6).astype(np.float32),
    }

    named = pack_tree(
        flat,
        is_ternary=lambda p: p.endswith("in_proj/kernel"),
        is_half=lambda p: p.startswith("embed"),
    )
    back = unpack_tree(named)

    assert named["layer_0/mixer/in_proj/kernel.codes"].dtype == np.uint8
    assert named["embed/embedding"].dtype == np.float16
    assert list(back) == list(flat)
    assert all(back[p].dtype == np.float32 for p in flat)
    assert all(back[p].shape == flat[p].shape for p in flat)
    assert np.array_equal(back["layer_0/norm/scale"], flat["layer_0/norm/scale"])
    assert np.abs(back["embed/embedding"] - flat["embed/embedding"]).max() < 2e-3
    kernel = "layer_0/mixer/in_proj/kernel"
    codes, scale = ternarise(flat[kernel])
    codes_back, scale_back = ternarise(back[kernel])
    assert np.array_equal(codes, codes_back)
    assert float(scale_back) == pytest.approx(float(scale), rel=1e-6)


def test_what_float16_cannot_hold_is_refused():
    flat = {"embed/embedding": np.array([1e5], np.float32)}

    with pytest.raises(ValueError, match=r"embed/embedding: got a magnitude of 100000"):
        pack_tree(flat, is_ternary=lambda p: False, is_half=lambda p: True)
