"""The product of codes: exact, the same bits by kernel and reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, bit_product, compat

needs_kernels = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)


def operands(tokens, d_in, d_out):
    rng = np.random.default_rng(tokens)
    x = rng.integers(-128, 128, (tokens, d_in)).astype(np.int8)
    w = rng.integers(-1, 2, (d_out, d_in)).astype(np.int8)
    scales = {
        "x_scale": rng.random((tokens, 1), np.float32) + 0.1,
        "w_scale": np.float32(0.3),
    }
    return x, w, scales


def product(x, w, scales, *, dtype=jnp.bfloat16, implementation="reference"):
    def run(x, w, scales):
        options = {"dtype": dtype, "implementation": implementation}
        return bit_product(x, w, **scales, **options)

    return jax.jit(run)(x, w, scales)


def test_the_reference_is_the_exact_product():
    x, w, scales = operands(5, 1000, 7)

    y = product(x, w, scales, dtype=jnp.float32)

    whole = np.int64(x) @ np.int64(w).T
    expected = whole * np.float64(scales["x_scale"] * scales["w_scale"])
    np.testing.assert_allclose(y, expected, rtol=1e-7)


@pytest.mark.usefixtures("products")
@needs_kernels
@pytest.mark.parametrize(
    "sizes",
    [
        (7, 96, 24),  # fewer rows than a tile; D a multiple of 32 only
        # More than one tile each way, none whole; on Hopper two pairs of blocks.
        (300, 160, 72),
    ],
)
def test_the_kernel_gives_the_references_bits(sizes):
    from pallas_kernels import mosaic

    arguments = operands(*sizes)
    with mosaic.races_raise():
        got = product(*arguments, implementation="pallas")

    np.testing.assert_array_equal(got, product(*arguments))


@needs_kernels
def test_a_dtype_may_be_given_by_name():
    arguments = operands(3, 32, 16)

    y = product(*arguments, dtype="bfloat16", implementation="pallas")

    np.testing.assert_array_equal(y, product(*arguments))


@pytest.mark.usefixtures("products")
@needs_kernels
def test_a_bad_row_spoils_itself_only():
    x, w, scales = operands(66, 32, 16)
    scales["x_scale"][65] = np.nan

    y = np.float32(product(x, w, scales, implementation="pallas"))

    assert np.isnan(y[65]).all()
    assert np.isfinite(y[:65]).all()


@needs_kernels
@pytest.mark.parametrize(
    ("capability", "by_wgmma"), [((9, 0), True), ((8, 9), False), ((12, 0), False)]
)
def test_the_form_is_that_of_the_gpu(monkeypatch, capability, by_wgmma):
    monkeypatch.setattr(backend, "capability", lambda: capability)

    program = jax.make_jaxpr(functools.partial(product, implementation="pallas"))
    text = str(program(*operands(66, 32, 16)))

    assert ("wgmma_ref" in text) == by_wgmma
    assert ("= mma " in text) != by_wgmma


@needs_kernels
@pytest.mark.parametrize(
    ("sizes", "dtype", "said"),
    [
        ((4, 32, 16), jnp.float32, "dtype: got float32"),
        ((4, 48, 16), jnp.bfloat16, "D: got 48; the kernel takes multiples of 32"),
        ((4, 32, 12), jnp.bfloat16, "F: got 12"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(sizes, dtype, said):
    with pytest.raises(NotImplementedError, match=said):
        product(*operands(*sizes), dtype=dtype, implementation="pallas")


X, W, SCALES = operands(4, 8, 6)


@pytest.mark.parametrize(
    ("x", "w", "change", "said"),
    [
        (X[0], W, {}, "bit_product: x_codes: got shape"),
        (X, W.T, {}, r"w_codes: got shape \(8, 6\); expected \(8, 8\)"),
        (X.astype(np.int32), W, {}, "x_codes: got dtype int32; expected int8 codes"),
        (X, W, {"x_scale": np.ones(4, np.float32)}, r"x_scale: got shape \(4,\)"),
        (X, W, {"w_scale": np.float16(1)}, "w_scale: got dtype float16"),
        (X, W, {"w_scale": 0.5}, "w_scale: got a float; expected an array"),
        (X, W, {"dtype": jnp.int32}, "dtype: got int32; expected a floating"),
    ],
)
def test_what_does_not_fit_is_named(x, w, change, said):
    with pytest.raises(ValueError, match=said):
        bit_product(
            jnp.asarray(x), jnp.asarray(w), **({"dtype": jnp.float32} | SCALES | change)
        )
