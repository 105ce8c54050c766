"""out_prod in plain JAX against NumPy in float64, its checks, and 2-bit packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from out_prod_cases import FLOAT32, assert_close, operands, truth, with_gradients

from pallas_kernels import out_prod, pack_planes, unpack_planes


@pytest.mark.parametrize("flags", ["", "a", "b", "ab"])
def test_the_reference_and_its_gradients_are_right(flags):
    case = operands(7, 45, 11, flags=flags, rank=3)

    got = with_gradients(
        case, flags=flags, codes=None, dtype=jnp.float32, implementation="reference"
    )

    assert_close(got, truth(case, flags), FLOAT32)


@pytest.mark.parametrize("codes", ["int8", "2bit"])
def test_codes_stand_for_whole_numbers(codes):
    case = operands(7, 45, 11, flags="b", rank=3, codes=codes)

    y, da, db, dscale, dtail = with_gradients(
        case, flags="b", codes=codes, dtype=jnp.float32, implementation="reference"
    )

    assert db is None
    right = truth(case, "b")
    assert_close((y, da, dscale, dtail), (right[0], right[1], *right[3:]), FLOAT32)


def test_float64_stays_float64():
    case = operands(5, 20, 6, flags="b", rank=2)
    with jax.enable_x64(True):
        got = with_gradients(
            case, flags="b", codes=None, dtype=jnp.float64, implementation="auto"
        )

    assert_close(got, truth(case, "b"), 1e-7)  # the scale is float32


@pytest.mark.parametrize("k", [1, 63, 256, 257, 300])
def test_planes_unpack_to_what_was_packed(k):
    codes = np.random.default_rng(k).integers(-1, 2, size=(5, k)).astype(np.int8)

    packed = pack_planes(jnp.asarray(codes))

    assert packed.dtype == jnp.uint8
    assert packed.shape[1] % 64 == 0
    assert packed.shape[1] <= -(-k // 4) + 63
    np.testing.assert_array_equal(unpack_planes(packed, k), codes)


A, B = jnp.zeros((4, 32)), jnp.zeros((32, 8))


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        ((A[0], B), {}, "out_prod: a: got shape"),
        ((A, B[:30]), {}, r"out_prod: b: got shape \(30, 8\); expected \(32, 8\)"),
        ((A, B), {"transpose_b": True}, r"expected \(32, 32\) = \(N, K\)|\(8, 32\)"),
        ((A.astype(int), B), {}, "out_prod: a: got dtype int32; expected a floating"),
        ((A, B.astype(jnp.bfloat16)), {}, "b: got dtype bfloat16; expected float32"),
        ((A, B.astype(jnp.uint8)), {}, "2-bit codes without transpose_b"),
        (
            (A, jnp.zeros((8, 7), jnp.uint8)),
            {"transpose_b": True},
            "got 7 bytes a row; expected at least 8",
        ),
        ((A, B), {"scale": jnp.ones(1)}, r"scale: got shape \(1,\)"),
        ((A, B), {"scale": 2.0}, "out_prod: scale: got a float; expected an array"),
        ((A, B), {"tail": (A[:, 0], B[0])}, r"tail\[0\]: got shape \(4,\)"),
        ((A, B), {"tail": (A[:, :0], B.T[:, :0])}, r"tail\[0\]: got shape \(4, 0\)"),
        ((A, B), {"tail": (A[:, :2], B[:, :2])}, r"tail\[1\]: got shape \(32, 2\)"),
        (
            (A, B),
            {"tail": (A[:, :2].astype(jnp.bfloat16), B[:8, :2])},
            r"tail\[0\]: got dtype bfloat16; expected float32",
        ),
    ],
)
def test_what_does_not_fit_is_named(arguments, more, said):
    with pytest.raises(ValueError, match=said):
        out_prod(*arguments, **more)
