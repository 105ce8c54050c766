"""What every mixer owes: the right numbers, causality, isolation, decoding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bitmamba.config import AttentionConfig, Mamba2Config
from bitmamba.models import MIXERS

NAMES = tuple(MIXERS)
LENGTH = 20
# Documents of a packed row; boundaries lie inside chunks of 8, one on a chunk's edge.
CUTS = (0, 5, 8, 13, LENGTH)


def _input(cfg, seed=0, rows=2, length=LENGTH):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, length, cfg.d_model)).astype(np.float32)


def _segments(cuts=CUTS, rows=2):
    ids = np.concatenate([np.full(b - a, i + 1) for i, (a, b) in _spans(cuts)])
    return np.tile(ids.astype(np.int32), (rows, 1))


def _spans(cuts):
    return list(enumerate(itertools.pairwise(cuts)))


def _apply(module, options=None):
    def run(params, x, **kwargs):
        return module.apply({"params": params}, x, **kwargs)

    return jax.jit(run, compiler_options=options)


def _gradients(module, cotangent, options, segments=None, argnums=(0, 1)):
    """Program of (params, x): y, and the gradients of sum(y · cotangent)."""

    def loss(params, x):
        y, _ = module.apply({"params": params}, x, segment_ids=segments)
        return (y * cotangent).sum(), y

    def run(params, x):
        gradients, y = jax.grad(loss, argnums, has_aux=True)(params, x)
        return y, gradients

    return jax.jit(run, compiler_options=options)


def _reference(float64, name, cfg, params, x, cotangent, cuts):
    """The same in float64, each document run alone; and the margin from ties."""
    spans = [span for _, span in _spans(cuts)]
    longest = max(b - a for a, b in spans)
    at = [np.minimum(np.arange(a, a + longest), len(x[0]) - 1) for a, _ in spans]

    def alone(params, document):
        margins = []
        y = float64.MIXERS[name](params, document, cfg, margins)
        return y, jnp.stack(margins).min() if margins else jnp.inf

    def forward(params, x):
        # What follows a document in its slice cannot change it: all is causal.
        documents = x[:, np.stack(at)].reshape(-1, longest, x.shape[-1])
        y, margins = jax.vmap(alone, (None, 0))(params, documents)
        y = y.reshape(len(x), len(spans), longest, -1)
        pieces = [y[:, i, : b - a] for i, (a, b) in enumerate(spans)]
        return jnp.concatenate(pieces, axis=1), margins.min()

    def loss(params, x):
        y, margin = forward(params, x)
        return (y * cotangent).sum(), (y, margin)

    with jax.enable_x64(True):
        params, x, cotangent = jax.tree.map(
            lambda t: jnp.asarray(t, jnp.float64), (params, x, cotangent)
        )
        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        grad = jax.jit(grad, compiler_options={"xla_backend_optimization_level": 0})
        gradients, (y, margin) = grad(params, x)
    return (y, gradients), float(margin)


def _variants():
    no_rope = AttentionConfig(n_heads=4, n_kv_heads=1, headdim=8, rope_theta=0.0)
    limited = Mamba2Config(headdim=8, d_state=4, chunk_size=8, dt_limit=(0.01, 0.6))
    return [
        *[pytest.param(name, {}, id=name) for name in NAMES],
        pytest.param("attention", {"attention": no_rope}, id="attention-no_rope-mqa"),
        pytest.param("mamba2", {"mamba2": limited}, id="mamba2-one_group-dt_limit"),
    ]


@pytest.mark.parametrize(("name", "changes"), _variants())
def test_values_and_all_gradients_equal_float64(
    name, changes, tiny, float64, make_mixer, relative_error, users_level
):
    cfg = tiny("MB*-", **changes)
    module, params = make_mixer(name, cfg)
    x, cotangent = _input(cfg), _input(cfg, seed=1)

    got = _gradients(module, cotangent, users_level, _segments())(params, x)
    expected, _ = _reference(float64, name, cfg, params, x, cotangent, CUTS)

    assert relative_error(got, expected) < 5e-6


# The seeds keep every value away from a rounding tie, so that float32 and float64 agree
# on every code.
TERNARY = [
    ("mamba2", "block", 88),
    ("bitmamba2", "linear", 75),
    ("attention", "linear", 184),
    ("mlp", "block", 17),
]


@pytest.mark.newest
@pytest.mark.parametrize(("name", "placement", "seed"), TERNARY)
def test_ternary_values_and_all_gradients_equal_float64(
    name, placement, seed, tiny, float64, make_mixer, relative_error
):
    cfg = tiny("MB*-", linear="bit", norm_placement=placement, norm_eps=1e-6)
    module, params = make_mixer(name, cfg, seed)
    x, cotangent = (_input(cfg, s, rows=1, length=7) for s in (seed, 100))

    got = _gradients(module, cotangent, None)(params, x)
    expected, margin = _reference(float64, name, cfg, params, x, cotangent, (0, 7))

    assert margin > 1e-3, "too near a rounding tie to compare; take another seed"
    assert relative_error(got, expected) < 5e-6


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_change_nothing_before_them(name, tiny, make_mixer, users_level):
    cfg = tiny("MB*-")
    module, params = make_mixer(name, cfg)
    run = _apply(module, users_level)
    x = _input(cfg)
    y, state = run(params, x)
    for cut in (1, 7, 8, 13):
        changed = x.copy()
        changed[:, cut:] += 1.0

        z, _ = run(params, changed)

        assert np.array_equal(y[:, :cut], z[:, :cut])
        assert not np.array_equal(y[:, cut], z[:, cut])
    assert state is None
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("name", "linear"), list(zip(NAMES, ["dense", "bit"] * 2, strict=True))
)
def test_documents_do_not_touch_each_other(name, linear, tiny, make_mixer, users_level):
    cfg = tiny("MB*-", linear=linear)
    module, params = make_mixer(name, cfg)
    x, cotangent = _input(cfg), _input(cfg, seed=1)
    # The dense program is that of the values' test, compiled once for both.
    argnums = (0, 1) if linear == "dense" else (1,)
    program = _gradients(module, cotangent, users_level, _segments(), argnums)

    def run(x):
        y, gradients = program(params, x)
        return y, gradients[-1]

    before = run(x)
    for _, (a, b) in _spans(CUTS):
        others = np.r_[0:a, b:LENGTH]
        for token in {a, b - 1}:
            changed = x.copy()
            changed[:, token] *= -3.0

            after = run(changed)

            for was, now in zip(before, after, strict=True):
                assert np.array_equal(was[:, others], now[:, others])
                assert not np.array_equal(was[:, token], now[:, token])


@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_whole(name, tiny, make_mixer, relative_error):
    cfg = tiny("MB*-")
    module, params = make_mixer(name, cfg)
    run = _apply(module)
    x = _input(cfg)
    whole, _ = run(params, x)

    for prefill in (0, 1, 11):
        state = MIXERS[name].init_state(cfg, len(x), LENGTH, jnp.float32)
        pieces = []
        for a, b in [(0, prefill)] * (prefill > 0) + [
            (t, t + 1) for t in range(prefill, LENGTH)
        ]:
            y, state = run(params, x[:, a:b], state=state, positions=_at(a, b))
            pieces.append(y)

        assert relative_error(jnp.concatenate(pieces, 1), whole) < 2e-6


def _at(a, b):
    return np.tile(np.arange(a, b, dtype=np.int32), (2, 1))


@pytest.mark.parametrize("name", ["mamba2", "bitmamba2"])
def test_state_is_float32_when_computing_in_bfloat16(name, tiny, make_mixer):
    cfg = tiny("MB", dtype="bfloat16")
    module, params = make_mixer(name, cfg)
    state = MIXERS[name].init_state(cfg, 2, 4, jnp.bfloat16)

    y, state = _apply(module)(params, _input(cfg), state=state)

    assert state.ssm.dtype == jnp.float32
    assert state.conv.dtype == jnp.bfloat16
    assert y.dtype == jnp.bfloat16
