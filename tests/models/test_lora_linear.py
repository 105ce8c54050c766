"""The fused gradient of an adapted layer, its kernel interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.models import lora_linear
from bitmamba.models.adapters import Adapter
from bitmamba.models.layers import Linear
from bitmamba.quant.ternary import TernaryWeight, freeze_ternary
from bitmamba.types import AdapterSpec
from pallas_kernels import backend, compat

pytestmark = pytest.mark.newest

needs_kernels = pytest.mark.skipif(
    not compat.HAS_MOSAIC_GPU, reason=f"needs {compat.MOSAIC_GPU_NEEDS}"
)
TOKENS, D, F, RANK = 21, 32, 48, 3
# Adapters of columns 8..24 and 24..48: the rest of the weight has none.
COLUMNS = ((8, 16), (24, 24))
# bfloat16 operands and one rounding, largest error over largest value. The ternary
# layer's truth rounds no activation: its dx passes straight through.
TOLERANCE = 1e-2


def layer(cfg, kernels, *, b_scale=1.0, kind="dense", dropout=0.0, magnitude=False):
    """(module, variables, x, dy) of one adapted layer."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    w = normal(D, F)
    codes = {"int8": jnp.int8, "compute": jnp.bfloat16}
    kernel = w.astype(jnp.bfloat16) if kind == "dense" else w
    if kind in codes:
        kernel = freeze_ternary(w, codes[kind])
    adapters = {}
    for start, width in COLUMNS:
        shape = (D, width)
        spec = AdapterSpec(f"p/{start}", "p", shape, start, RANK, 0.75, dropout)
        a, b = normal(D, RANK), b_scale * normal(RANK, width)
        length = jnp.full((width,), 2.0) if magnitude else None
        adapters[str(start)] = Adapter(spec=spec, a=a, b=b, magnitude=length)
    variables = {"params": {"kernel": kernel}, "lora": adapters}
    dy = normal(TOKENS, F, dtype=jnp.bfloat16)
    return Linear(F, cfg, kernels=kernels), variables, normal(TOKENS, D), dy


def outputs(module, variables, x, dy, **rngs):
    """(y, dx, d adapters)."""

    def apply(x, adapters):
        return module.apply({**variables, "lora": adapters}, x, **rngs)

    def run(x, adapters):
        y, pull = jax.vjp(apply, x, adapters)
        return y, *pull(dy)

    return jax.jit(run)(x, variables["lora"])


def truth(variables, x, dy):
    """(dx, [(da, db), ...]) in float64."""
    kernel = variables["params"]["kernel"]
    w = kernel.value() if isinstance(kernel, TernaryWeight) else kernel
    x, dy = np.float64(x), np.float64(dy)
    dx, grads = dy @ np.float64(w).T, []
    for adapter in sorted(variables["lora"].values(), key=lambda t: t.spec.start):
        spec, a, b = adapter.spec, np.float64(adapter.a), np.float64(adapter.b)
        part = dy[:, spec.start : spec.start + spec.shape[1]]
        dx += spec.scale * part @ b.T @ a.T
        grads.append((spec.scale * x.T @ part @ b.T, spec.scale * (x @ a).T @ part))
    return dx, grads


def assert_close(got, expected):
    assert got.shape == expected.shape
    largest = np.abs(expected).max()
    assert np.abs(np.float64(got) - expected).max() <= TOLERANCE * largest


@needs_kernels
@pytest.mark.parametrize("kind", ["dense", "compute", "int8"])
@pytest.mark.parametrize("b_scale", [0.0, 1.0])
def test_every_gradient_and_the_forward_pass(kind, b_scale, tiny):
    from pallas_kernels import mosaic

    linear = "dense" if kind == "dense" else "bit"
    cfg = tiny("-", linear=linear, dtype="bfloat16")
    plain = layer(cfg, "reference", b_scale=b_scale, kind=kind)
    fused = layer(cfg, "pallas", b_scale=b_scale, kind=kind)
    y, _, grads_plain = outputs(*plain)
    with mosaic.races_raise():
        y_fused, dx, grads = outputs(*fused)

    np.testing.assert_array_equal(y_fused, y)
    expected_dx, expected = truth(*fused[1:])
    assert_close(dx, expected_dx)
    for (da, db), (start, _) in zip(expected, COLUMNS, strict=True):
        got = grads[str(start)]
        assert_close(got.b, db)
        if b_scale:
            assert_close(got.a, da)
        else:
            assert not np.asarray(got.a).any()
        # The adapters' own gradients are the layer's, whichever way dx is computed.
        np.testing.assert_array_equal(got.a, grads_plain[str(start)].a)


@needs_kernels
@pytest.mark.parametrize("case", [{"dropout": 0.5}, {"magnitude": True}])
def test_dropout_and_magnitudes_keep_their_own_gradients(case, tiny, caplog):
    backend.log_choice.cache_clear()
    caplog.set_level("INFO", "pallas_kernels")
    cfg = tiny("-", dtype="bfloat16")
    rngs = {"rngs": {"dropout": jax.random.key(1)}} if "dropout" in case else {}
    told = "dropout" if "dropout" in case else "a magnitude"

    got = outputs(*layer(cfg, "pallas", **case), **rngs)
    expected = outputs(*layer(cfg, "reference", **case), **rngs)

    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert f"pallas runs reference (an adapter has {told})" in caplog.text


def test_auto_on_a_cpu_is_the_reference_to_the_bit(tiny, monkeypatch):
    cfg = tiny("-", linear="bit", dtype="bfloat16")
    expected = outputs(*layer(cfg, "reference", kind="int8"))

    def never(*_):
        raise AssertionError("the fused layer was taken")

    monkeypatch.setattr(lora_linear, "lora_linear", never)
    got = outputs(*layer(cfg, "auto", kind="int8"))

    jax.tree.map(np.testing.assert_array_equal, got, expected)


@needs_kernels
def test_what_the_kernel_cannot_take_is_said_before_the_step(tiny):
    module, variables, x, _ = layer(tiny("-", dtype="float32"), "pallas")

    with pytest.raises(NotImplementedError, match=r"out_prod: .* got float32"):
        module.apply(variables, x)


def test_on_an_old_jax_pallas_says_what_it_needs(tiny, monkeypatch):
    monkeypatch.setattr(compat, "HAS_MOSAIC_GPU", False)
    module, variables, x, _ = layer(tiny("-", dtype="bfloat16"), "pallas")

    with pytest.raises(NotImplementedError, match=r"the kernel needs JAX 0\.11"):
        module.apply(variables, x)
