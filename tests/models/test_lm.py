"""The whole model: values, gradients, isolation, packing, dtypes, heads, decoding."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba import paths
from bitmamba.losses.cross_entropy import cross_entropy
from bitmamba.models import (
    build_model,
    count_params,
    init_decode_state,
    init_params,
    param_shapes,
)

pytestmark = pytest.mark.newest

HYBRID = "MB*-"
LENGTH = 20
CUTS = (0, 5, 8, 13, LENGTH)


def _tokens(seed=0, shape=(2, LENGTH), high=48):
    rng = np.random.default_rng(seed)
    return rng.integers(0, high, shape).astype(np.int32)


def _segments():
    ids = np.searchsorted(CUTS, np.arange(LENGTH), side="right")
    return np.tile(ids.astype(np.int32), (2, 1))


def test_documents_of_a_window_do_not_touch_each_other(tiny, make_lm, users_level):
    # Every kind of layer alone: test_mixers. Given four documents whose tokens come
    # from four disjoint parts of the vocabulary, so that rows of the embedding's
    # gradient belong to one document each.
    cfg = tiny("M*")
    model, params = make_lm(cfg)
    segments = _segments()
    tokens = _tokens(high=12) + 12 * (segments - 1)
    cotangent = _tokens(1, (2, LENGTH, cfg.d_model)) - 24.0

    def both(tokens, params):
        def loss(params):
            hidden, head = model.apply(
                {"params": params}, tokens, segment_ids=segments, method="features"
            )
            return (hidden * cotangent).sum(), (hidden, hidden @ head)

        gradient, outputs = jax.grad(loss, has_aux=True)(params)
        return gradient["embed"]["embedding"], outputs

    run = jax.jit(both, compiler_options=users_level)
    embedding, outputs = run(tokens, params)
    for i, (a, b) in enumerate(itertools.pairwise(CUTS)):
        changed = tokens.copy()
        changed[:, b - 1] = (changed[:, b - 1] + 5) % 12 + 12 * i

        embedding_now, outputs_now = run(changed, params)

        rows = np.r_[0 : 12 * i, 12 * (i + 1) : 48]
        places = np.r_[0:a, b:LENGTH]
        assert np.array_equal(embedding[rows], embedding_now[rows])
        assert not np.array_equal(embedding, embedding_now)
        for was, now in zip(outputs, outputs_now, strict=True):
            assert np.array_equal(was[:, places], now[:, places])
            assert not np.array_equal(was, now)


def test_the_loss_of_a_window_is_that_of_its_documents_alone(tiny, make_lm):
    cfg = tiny(HYBRID)
    model, params = make_lm(cfg)
    tokens, segments = _tokens(), _segments()

    def total(tokens, segments):
        hidden, head = model.apply(
            {"params": params}, tokens, segment_ids=segments, method="features"
        )
        targets = jnp.roll(tokens, -1, axis=1)
        last = jnp.roll(segments, -1, axis=1) != segments
        last = last.at[:, -1].set(True)
        return jnp.where(last, 0.0, cross_entropy(hidden, head, targets)).sum(1)

    packed = jax.jit(total)(tokens, segments)
    alone = np.zeros(2)
    total_alone = jax.jit(total)
    for a, b in itertools.pairwise(CUTS):
        # The rest of the row is padding, as when a document has a window of its own.
        moved, ids = np.zeros_like(tokens), np.zeros_like(segments)
        moved[:, : b - a], ids[:, : b - a] = tokens[:, a:b], 1
        padding = ids.copy()
        padding[:, b - a :] = np.arange(2, 2 + LENGTH - (b - a))
        alone += np.asarray(total_alone(moved, padding), np.float64)

    assert np.abs(packed / alone - 1).max() < 1e-6


def test_segments_without_positions_count_from_each_start(tiny, make_lm):
    model, params = make_lm(tiny("*"))
    tokens, segments = _tokens(), _segments()
    positions = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(CUTS)])
    positions = np.tile(positions.astype(np.int32), (2, 1))
    run = jax.jit(lambda **kw: model.apply({"params": params}, tokens, **kw))

    given = run(segment_ids=segments, positions=positions)

    assert np.array_equal(run(segment_ids=segments), given)
    assert not np.array_equal(run(segment_ids=segments, positions=positions * 2), given)


def test_logits_are_hidden_times_head(tiny, make_lm):
    for changes in ({}, {"linear": "bit"}, {"tie_embeddings": True}):
        model, params = make_lm(tiny("-", **changes))

        @jax.jit
        def run(params, model=model):
            features = model.apply({"params": params}, _tokens(), method="features")
            return model.apply({"params": params}, _tokens()), *features

        logits, hidden, head = run(params)

        # Two products: on some processors they sum in different orders.
        np.testing.assert_allclose(logits, hidden @ head, rtol=2e-6, atol=2e-6)
        assert logits.dtype == jnp.float32
        if "tie_embeddings" in changes:
            assert np.array_equal(head, params["embed"]["embedding"].T)
            assert "lm_head" not in params


def test_ternary_head_gives_quantised_values_and_straight_gradients(tiny, make_lm):
    model, params = make_lm(tiny("-", linear="bit"))

    def loss(params):
        hidden, head = model.apply({"params": params}, _tokens(), method="features")
        return (hidden.sum((0, 1)) @ head).sum(), (hidden, head)

    gradient, (hidden, head) = jax.jit(jax.grad(loss, has_aux=True))(params)

    assert len(np.unique(head)) == 3
    expected = np.asarray(hidden, np.float64).sum((0, 1))[:, None]
    assert np.allclose(gradient["lm_head"]["kernel"], expected, rtol=1e-4, atol=1e-4)


def test_what_stays_float32_when_computing_in_bfloat16(tiny):
    cfg = tiny(HYBRID, dtype="bfloat16", linear="bit")
    shapes = paths.flatten(param_shapes(build_model(cfg)))
    state = init_decode_state(cfg, 1, 4)

    assert {leaf.dtype for leaf in shapes.values()} == {jnp.dtype("float32")}
    pattern = r".*/(A_log|D|dt_bias|scale)"
    assert sum(bool(re.fullmatch(pattern, p)) for p in shapes) == 6 + 4 + 2 + 1
    assert state.layers[0].ssm.dtype == state.layers[1].ssm.dtype == jnp.float32
    assert state.layers[2].keys.dtype == jnp.bfloat16


def test_bfloat16_stays_near_float32(tiny, make_lm, relative_error):
    cfg = tiny(HYBRID)
    model, params = make_lm(cfg)
    narrow = build_model(dataclasses.replace(cfg, dtype="bfloat16"))
    run = jax.jit(lambda m: m.apply({"params": params}, _tokens()), static_argnums=0)

    got, expected = run(narrow), run(model)

    assert got.dtype == jnp.float32
    assert 1e-6 < relative_error(got, expected) < 0.05


def test_remat_changes_no_value_and_no_path(tiny, make_lm, relative_error):
    cfg = tiny("M-")
    model, params = make_lm(cfg)
    lean = build_model(dataclasses.replace(cfg, remat=True))

    def loss(model):
        def total(params):
            return (model.apply({"params": params}, _tokens()) ** 2).sum()

        return jax.jit(jax.value_and_grad(total))(params)

    def remats(model):
        run = jax.make_jaxpr(lambda p: model.apply({"params": p}, _tokens()))
        return str(run(params)).count("prevent_cse=True")

    assert (remats(model), remats(lean)) == (0, 2)
    assert relative_error(loss(lean), loss(model)) < 2e-6
    assert jax.tree.structure(param_shapes(lean)) == jax.tree.structure(params)


def test_shapes_are_those_of_the_initialised_model(tiny):
    model = build_model(tiny("MM*-", vocab_size=8))

    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))

    flat, shapes = paths.flatten(params), paths.flatten(param_shapes(model))
    assert {p: (v.shape, v.dtype) for p, v in flat.items()} == {
        p: (v.shape, v.dtype) for p, v in shapes.items()
    }
    assert count_params(model) == sum(v.size for v in flat.values())
    kernels = [flat[f"layer_{i}/mixer/in_proj/kernel"] for i in (0, 1)]
    assert not np.array_equal(*kernels)


def test_an_unknown_mixer_lists_the_known_ones(tiny):
    cfg = dataclasses.replace(tiny("M"), layers=("mamba2", "mamba"))

    with pytest.raises(ValueError, match=r"layers\[1\]: got 'mamba'; expected one of"):
        build_model(cfg)


@pytest.fixture(scope="module")
def decoder(tiny, make_lm):
    """(config, decode(tokens, state, segment_ids), the whole model at once)."""
    cfg = tiny(HYBRID)
    model, params = make_lm(cfg)

    @jax.jit
    def decode(tokens, state, ids):
        return model.apply(
            {"params": params}, tokens, state=state, segment_ids=ids, method="decode"
        )

    return cfg, decode, jax.jit(lambda tokens: model.apply({"params": params}, tokens))


def test_prefill_then_tokens_equals_the_whole(decoder, relative_error):
    cfg, decode, whole = decoder
    tokens = _tokens()
    expected = whole(tokens)

    for prefill in (0, 11):
        state = init_decode_state(cfg, 2, LENGTH)
        edges = [*([0] if prefill else []), *range(prefill, LENGTH + 1)]
        pieces = []
        for a, b in itertools.pairwise(edges):
            logits, state = decode(tokens[:, a:b], state, None)
            pieces.append(logits)

        assert relative_error(jnp.concatenate(pieces, 1), expected) < 5e-6
        assert state.positions.tolist() == [LENGTH, LENGTH]


@pytest.mark.parametrize("rows", [1, 2], ids=["batch_of_one", "beside_a_longer_prompt"])
def test_left_padding_changes_nothing(rows, decoder, relative_error):
    # Cases B094 and B096: a short prompt, padded, alone and beside a longer one.
    cfg, decode, _ = decoder
    short, longer, after = _tokens(0, (1, 3)), _tokens(1, (1, 12)), _tokens(2, (1, 4))
    padded = np.pad(short, ((0, 0), (9, 0)), constant_values=7)
    tokens = np.concatenate([padded, longer])[:rows]
    real = np.ones_like(tokens)
    real[0, :9] = 0

    logits, state = decode(short, init_decode_state(cfg, 1, LENGTH), None)
    expected = [logits[0, -1]]
    for t in range(4):
        logits, state = decode(after[:, t : t + 1], state, None)
        expected.append(logits[0, -1])
    logits, state = decode(tokens, init_decode_state(cfg, rows, LENGTH), real)
    got = [logits[0, -1]]
    for t in range(4):
        step = np.tile(after[:, t : t + 1], (rows, 1))
        logits, state = decode(step, state, None)
        got.append(logits[0, -1])

    assert relative_error(jnp.stack(got), jnp.stack(expected)) < 5e-6
    assert state.positions.tolist() == [7, 16][:rows]


def test_left_padding_fed_token_by_token_changes_nothing(decoder, relative_error):
    cfg, decode, _ = decoder
    text = _tokens(0, (1, 3))
    expected, _ = decode(text, init_decode_state(cfg, 1, LENGTH), None)
    tokens, real = np.pad(text, ((0, 0), (2, 0))), np.array([[0, 0, 1, 1, 1]])
    state = init_decode_state(cfg, 1, LENGTH)

    for t in range(5):
        logits, state = decode(tokens[:, t : t + 1], state, real[:, t : t + 1])

    assert relative_error(logits[:, -1], expected[:, -1]) < 5e-6
