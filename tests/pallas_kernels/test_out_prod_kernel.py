"""The kernel of out_prod, interpreted with its races raised, against float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from out_prod_cases import (
    BFLOAT16,
    assert_close,
    operands,
    stored,
    truth,
    with_gradients,
)

from pallas_kernels import backend, compat, out_prod
from pallas_kernels.out_prod.shapes import PLAIN
from pallas_kernels.tile_sizes import Tiles

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)

kernel_with_gradients = functools.partial(
    with_gradients, dtype=jnp.bfloat16, implementation="pallas"
)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    ("flags", "m", "k", "n", "rank"),
    [
        ("", 80, 40, 72, 0),  # no size a multiple of its tile; what is left of K
        ("a", 72, 100, 40, 4),  # stored (K, M): K need be a multiple of nothing
        ("b", 7, 96, 24, 5),  # fewer rows than a tile
        ("ab", 136, 32, 64, 16),  # more than one tile of rows
    ],
)
def test_forward_and_every_gradient(flags, m, k, n, rank):
    from pallas_kernels import mosaic

    case = operands(m, k, n, flags=flags, rank=rank)
    with mosaic.races_raise():
        got = kernel_with_gradients(case, flags=flags, codes=None)

    assert_close(got, truth(case, flags), BFLOAT16)


@pytest.mark.parametrize(
    ("flags", "m", "k", "n", "codes"),
    [("a", 72, 90, 40, None), ("b", 70, 48, 40, "int8")],
)
def test_what_tma_does_not_take_is_padded(monkeypatch, flags, m, k, n, codes):
    """The portable form on a GPU that copies by TMA, sm_120 for one."""
    monkeypatch.setattr(backend, "capability", lambda: (12, 0))
    case = operands(m, k, n, flags=flags, rank=4, codes=codes)
    a, b, scale, tail, _ = case
    a, *tail = (jnp.asarray(t, jnp.bfloat16) for t in (a, *tail))
    b = stored(b, codes) if codes else jnp.asarray(b, jnp.bfloat16)

    y = out_prod(
        a,
        b,
        transpose_a="a" in flags,
        transpose_b="b" in flags,
        scale=jnp.asarray(scale),
        tail=tuple(tail),
        implementation="pallas",
    )

    assert_close([np.float64(y)], truth(case, flags)[:1], BFLOAT16)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("codes", ["int8", "2bit"])
def test_codes_are_decoded_in_the_tile(codes):
    from pallas_kernels import mosaic

    # 288 codes a row: 2-bit ones fill all of one plane of 128 and more, not all four.
    case = operands(70, 288, 40, flags="b", rank=3, codes=codes)
    with mosaic.races_raise():
        y, da, _, dscale, dtail = kernel_with_gradients(case, flags="b", codes=codes)

    right = truth(case, "b")
    assert_close((y, da, dscale, dtail), (right[0], right[1], *right[3:]), BFLOAT16)


@pytest.mark.usefixtures("products")
def test_the_kernel_keeps_what_is_left_of_k_of_int8_codes():
    case = operands(64, 48, 16, flags="b", codes="int8")

    got = kernel_with_gradients(case, flags="b", codes="int8")

    assert_close(got[:2], truth(case, "b")[:2], BFLOAT16)


@pytest.mark.parametrize("tiles", [PLAIN, Tiles(64, 32, 16, 4)])
def test_other_tiles_give_the_same_product(tiles):
    from pallas_kernels import mosaic
    from pallas_kernels.out_prod.kernels import out_prod_kernel

    case = operands(64, 80, 32, flags="b")
    a, b = (jnp.asarray(t, jnp.bfloat16) for t in case[:2])
    flags = {"transpose_a": False, "transpose_b": True}
    with mosaic.races_raise():
        y = out_prod_kernel(a, b, jnp.full((1,), case[2]), None, **flags, tiles=tiles)

    assert_close([np.float64(y)], truth(case, "b")[:1], BFLOAT16)


@pytest.mark.usefixtures("products")
def test_a_bad_row_spoils_its_own_results_only():
    a, b, _, _, _ = operands(80, 64, 72, flags="b")
    a[79], b[71] = np.nan, np.inf

    y = out_prod(
        *(jnp.asarray(t, jnp.bfloat16) for t in (a, b)),
        transpose_b=True,
        implementation="pallas",
    )

    assert np.isnan(np.float64(y[79])).all()
    assert not np.isfinite(np.float64(y[:, 71])).any()
    assert np.isfinite(np.float64(y[:79, :71])).all()


@pytest.mark.usefixtures("products")
def test_float16_runs_too():
    case = operands(64, 32, 16, flags="b")

    a, b = (jnp.asarray(t, jnp.float16) for t in case[:2])

    y = out_prod(a, b, transpose_b=True, scale=case[2], implementation="pallas")

    assert y.dtype == jnp.float16
    assert_close([np.float64(y)], truth(case, "b")[:1], 5e-4)


@pytest.mark.parametrize(("m", "n", "codes"), [(264, 72, None), (136, 136, "2bit")])
def test_on_hopper_blocks_take_several_tiles_each(m, n, codes):
    """The ring runs on; the last pair of blocks is half full, the tail fills all."""
    from pallas_kernels import mosaic
    from pallas_kernels.out_prod.kernels_hopper import out_prod_wgmma

    case = operands(m, 192, n, flags="b", rank=136, codes=codes)
    a, b, scale, (u, v), _ = case
    a, u, v = (jnp.asarray(t, jnp.bfloat16) for t in (a, u, v))
    b = stored(b, codes) if codes else jnp.asarray(b, jnp.bfloat16)
    flags = {"transpose_a": False, "transpose_b": True}
    tiles = Tiles(128, 64, 64, 3)
    with mosaic.races_raise():
        y = out_prod_wgmma(a, b, jnp.full((1,), scale), (u, v), **flags, tiles=tiles)

    assert_close([np.float64(y)], truth(case, "b")[:1], BFLOAT16)


@pytest.mark.parametrize(
    ("capability", "rank", "codes", "form"),
    [
        ((9, 0), 4, None, "wgmma"),
        ((9, 0), 4, "2bit", "wgmma"),
        ((8, 6), 4, None, "mma"),
        ((12, 0), 4, None, "mma"),
        ((9, 0), 300, None, "mma"),  # a tail that shared memory does not hold
    ],
)
def test_the_form_is_that_of_the_gpu(monkeypatch, capability, rank, codes, form):
    monkeypatch.setattr(backend, "capability", lambda: capability)
    a, b, scale, tail, _ = operands(128, 256, 64, flags="b", rank=rank, codes=codes)
    a, *tail = (jnp.asarray(t, jnp.bfloat16) for t in (a, *tail))
    b = stored(b, codes) if codes else jnp.asarray(b, jnp.bfloat16)

    def product(a, tail):
        options = {"transpose_b": True, "implementation": "pallas"}
        return out_prod(a, b, scale=scale, tail=tuple(tail), **options)

    program = str(jax.make_jaxpr(product)(a, tail))

    assert set(re.findall(r"= (mma) |(wgmma)_ref", program)) == {
        ("mma", "") if form == "mma" else ("", "wgmma")
    }


@pytest.mark.parametrize(
    ("shapes", "dtype", "flags", "codes", "said"),
    [
        ((64, 32, 16), jnp.float32, "", None, "got float32; the kernel takes bfloat16"),
        (
            (64, 32, 16),
            jnp.bfloat16,
            "",
            "int8",
            r"stored \(K, N\); the kernel decodes",
        ),
        ((64, 36, 16), jnp.bfloat16, "b", None, "a: got 36 columns of bfloat16"),
        ((64, 40, 16), jnp.bfloat16, "b", "int8", "b: got 40 columns of int8"),
        ((64, 32, 12), jnp.bfloat16, "b", None, "N: got 12"),
        ((64, 32, 8), jnp.bfloat16, "b", None, "N: got 8"),
        ((64, 8, 16), jnp.bfloat16, "b", None, "K: got 8; the kernel takes 16 or more"),
        ((64, 16, 16), jnp.bfloat16, "b", "int8", "K: got 16; .* 32 or more of int8"),
        ((64, 48, 16), jnp.bfloat16, "b", "2bit", "K: got 48; .* multiples of 32"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(shapes, dtype, flags, codes, said):
    a, b, *_ = operands(*shapes, flags=flags, codes=codes)
    a = jnp.asarray(a, dtype)
    b = stored(b, codes) if codes else jnp.asarray(b, dtype)

    with pytest.raises(NotImplementedError, match=said):
        out_prod(a, b, transpose_b="b" in flags, implementation="pallas")


def test_it_runs_under_jit_checkpoint_and_grad():
    a, b, *_ = operands(64, 32, 16, flags="b")
    a, b = (jnp.asarray(t, jnp.bfloat16) for t in (a, b))

    def loss(implementation):
        def f(a, b):
            y = out_prod(jnp.sin(a), b, transpose_b=True, implementation=implementation)
            return jnp.sum(jnp.tanh(y.astype(jnp.float32)))

        return jax.jit(jax.grad(jax.checkpoint(f), argnums=(0, 1)))(a, b)

    for got, expected in zip(loss("pallas"), loss("reference"), strict=True):
        assert_close([np.float64(got)], [np.float64(expected)], 2 * BFLOAT16)
