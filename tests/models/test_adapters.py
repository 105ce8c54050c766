"""Adapters: values and gradients against float64 weights with the adapter merged in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config import LoraConfig
from bitmamba.lora.adapters import adapter_shapes
from bitmamba.lora.placement import place_adapters
from bitmamba.models import build_model, init_decode_state, param_shapes, variables
from bitmamba.models.adapters import Adapter, add_branches, column_norms
from bitmamba.models.bitlinear import bit_linear, frozen_bit_linear
from bitmamba.models.layers import Linear
from bitmamba.models.sites import adapter_sites, state_offset_shapes
from bitmamba.quant.ternary import freeze_ternary, ternarise
from bitmamba.types import AdapterSpec

pytestmark = pytest.mark.newest

EVERY = ("in_proj.x", "in_proj.B", "in_proj.dt", "out_proj", "q_proj", "o_proj")
EVERY = (*EVERY, "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


def adapted_model(cfg, fill, *, offsets=True, **lora):
    """(model, tree of base and random adapters, paths of the adapters' leaves)."""
    shapes = param_shapes(build_model(cfg))
    specs = place_adapters(
        LoraConfig(rank=3, alpha=4.5, **lora), adapter_sites(cfg, shapes)
    )
    extra = state_offset_shapes(cfg) if offsets else {}
    leaves = fill(adapter_shapes(specs, extra), seed=7)
    flat = paths.flatten(leaves)
    for path, leaf in flat.items():
        flat[path] = 0.5 + abs(leaf) if path.endswith("magnitude") else 0.3 * leaf
    tree = paths.unflatten(paths.flatten(fill(shapes)) | flat)
    return build_model(cfg, adapters=specs), tree, sorted(flat)


def for_reference(tree, specs):
    """The tree as tests/models/float64.py reads adapters: lists beside the weight."""
    flat = paths.flatten(tree)
    lists = {}
    for spec in specs:
        a, b = flat.pop(f"{spec.path}/a"), flat.pop(f"{spec.path}/b")
        length = flat.pop(f"{spec.path}/magnitude", None)
        entry = (spec.start, spec.scale, a, b, length)
        lists.setdefault(f"{spec.site}/lora", []).append(entry)
    return paths.unflatten(flat | lists)


CASES = {
    "slices": {"place": (*EVERY, "embed", "lm_head")},
    "whole": {"place": ("all",), "rslora": True, "dora": True},
}


@pytest.mark.parametrize(("pattern", "case"), [("MB*-", "slices"), ("M", "whole")])
def test_logits_and_gradients_equal_float64_weights_with_the_adapter_merged(
    pattern, case, tiny, fill, float64, relative_error
):
    cfg = tiny(pattern)
    model, tree, _ = adapted_model(cfg, fill, **CASES[case])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 48, (1, 11)).astype(np.int32)
    cotangent = rng.standard_normal((1, 11, 48)).astype(np.float32)

    def loss(tree):
        logits = model.apply(variables(model, tree), tokens)
        return (logits * cotangent).sum(), logits

    def loss64(tree):
        logits = float64.lm(for_reference(tree, model.adapters), tokens[0], cfg)[None]
        return (logits * cotangent).sum(), logits

    got = jax.jit(jax.grad(loss, has_aux=True))(tree)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda t: jnp.asarray(t, jnp.float64), tree)
        options = {"xla_backend_optimization_level": 0}
        grad = jax.jit(jax.grad(loss64, has_aux=True), compiler_options=options)
        expected = grad(wide)

    assert relative_error(got, expected) < 2e-5


def test_a_tied_head_sees_the_adapter_of_the_embedding(
    tiny, fill, float64, relative_error
):
    cfg = tiny("-", tie_embeddings=True)
    model, tree, leaves = adapted_model(cfg, fill, place=("embed",))
    tokens = np.arange(9, dtype=np.int32)[None]

    logits = model.apply(variables(model, tree), tokens)

    assert leaves == ["embed/a", "embed/b"]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda t: jnp.asarray(t, jnp.float64), tree)
        expected = float64.lm(for_reference(wide, model.adapters), tokens[0], cfg)
    assert relative_error(logits[0], expected) < 1e-5


def test_a_branch_beside_ternary_weights_sees_the_unquantised_input(tiny):
    cfg = tiny("-", linear="bit")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 16)).astype(np.float32)
    w, a, b = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((16, 12), (16, 3), (3, 12))
    )
    spec = AdapterSpec("p", "p", (16, 12), 0, 3, 0.75)
    module = Linear(12, cfg)
    frozen = freeze_ternary(w, jnp.float32)
    adapter = Adapter(spec=spec, a=a, b=b)

    y = module.apply({"params": {"kernel": frozen}, "lora": {"all": adapter}}, x)

    wide = [np.float64(t) for t in (x, a, b)]
    branch = 0.75 * wide[0] @ wide[1] @ wide[2]
    base = np.float64(bit_linear(x, w, cfg.bitlinear, jnp.dtype("float32")))
    np.testing.assert_allclose(y, base + branch, rtol=0, atol=3e-6 * abs(base).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codes", ["compute", "int8"])
def test_a_frozen_ternary_product_is_that_of_its_latent_weight_bit_for_bit(
    dtype, codes, tiny
):
    cfg, dtype = tiny("-", linear="bit").bitlinear, jnp.dtype(dtype)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 33)).astype(np.float32)
    w = rng.standard_normal((33, 10)).astype(np.float32)
    dy = rng.standard_normal((7, 10)).astype(dtype)
    frozen = freeze_ternary(w, dtype if codes == "compute" else jnp.int8)

    y, pull = jax.vjp(lambda x: frozen_bit_linear(x, frozen, cfg, dtype), x)
    y_latent, pull_latent = jax.vjp(lambda x: bit_linear(x, w, cfg, dtype), x)

    assert np.array_equal(y, y_latent)
    assert np.array_equal(pull(dy)[0], pull_latent(dy)[0])
    assert np.array_equal(frozen.value(), ternarise(w)[0] * ternarise(w)[1])


def test_column_norms_are_those_of_the_merged_weight():
    rng = np.random.default_rng(2)
    w, a, b = (rng.standard_normal(s) for s in ((40, 9), (40, 4), (4, 9)))
    spec = AdapterSpec("p", "p", (40, 9), 0, 4, 2.0)
    arrays = [np.float32(t) for t in (w, a, b)]

    norms = column_norms(arrays[0], Adapter(spec=spec, a=arrays[1], b=arrays[2]))

    np.testing.assert_allclose(norms, np.linalg.norm(w + 2 * a @ b, axis=0), rtol=2e-6)


def test_dropout_drops_the_share_and_keeps_the_mean():
    spec = AdapterSpec("p", "p", (400, 1), 0, 1, 1.0, dropout=0.25)
    adapter = Adapter(spec=spec, a=jnp.ones((400, 1)), b=jnp.ones((1, 1)))
    x, y = jnp.ones((500, 400)), jnp.zeros((500, 1))

    def run(key):
        return np.asarray(add_branches(y, x, [adapter], weight=None, key=key))[:, 0]

    once, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))

    assert np.array_equal(run(None), np.full(500, 400.0))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    # 400 draws of 0 or 4/3: standard deviation of the sum 11.5, of 500 means 0.52.
    assert abs(once.mean() - 400) < 3 * 0.52
    assert 10.5 < once.std() < 12.7


def test_decoding_with_adapters_equals_the_whole_forward(tiny, fill, relative_error):
    cfg = tiny("MB*-")
    model, tree, _ = adapted_model(cfg, fill, place=("all",))
    tokens = np.random.default_rng(3).integers(0, 48, (2, 6)).astype(np.int32)
    held = variables(model, tree)

    @jax.jit
    def step(tokens, state):
        return model.apply(held, tokens, state=state, method="decode")

    state, parts = init_decode_state(cfg, 2, 8), []
    for t in range(6):
        logits, state = step(tokens[:, t : t + 1], state)
        parts.append(logits)

    whole = jax.jit(lambda t: model.apply(held, t))(tokens)
    assert relative_error(np.concatenate(parts, 1), whole) < 1e-5


def test_adapters_of_one_document_do_not_reach_another(tiny, fill):
    cfg = tiny("MB*-", linear="bit")
    model, tree, leaves = adapted_model(cfg, fill, place=("all",))
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 48, (1, 20)).astype(np.int32)
    segments = np.repeat([1, 2], [9, 11])[None].astype(np.int32)
    weight = rng.standard_normal((1, 20, 16)).astype(np.float32) * (
        segments[..., None] == 2
    )

    @jax.jit
    def run(tokens):
        def loss(tree):
            hidden, _ = model.apply(
                variables(model, tree), tokens, segment_ids=segments, method="features"
            )
            return (hidden * weight).sum()

        grads = paths.flatten(jax.grad(loss)(tree))
        return {path: grads[path] for path in leaves}

    changed = tokens.copy()
    changed[0, 8] = (changed[0, 8] + 5) % 48
    before, after = run(tokens), run(changed)

    for path in leaves:
        assert np.array_equal(before[path], after[path]), path
        assert np.any(before[path] != 0), path
