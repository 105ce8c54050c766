"""The bundled form of a model: small, lossless in what the model computes."""

import jax
import numpy as np

from bitmamba.config import AttentionConfig, Mamba2Config, MLPConfig, ModelConfig
from bitmamba.config_read import from_config_dict
from bitmamba.io.base import load_base, save_base
from bitmamba.models import build_model, init_params, param_shapes
from bitmamba.paths import flatten
from bitmamba.quant.ternary import ternarise
from configs.base import default_config

SMALL = ModelConfig(
    vocab_size=64,
    d_model=32,
    layers=("mamba2", "attention", "mlp"),
    dtype="float32",
    mamba2=Mamba2Config(headdim=16, d_state=8),
    attention=AttentionConfig(headdim=8),
    mlp=MLPConfig(d_ff=48),
)


def random_params(model, seed):
    return jax.jit(lambda key: init_params(model, key))(jax.random.key(seed))


def test_codes_and_scales_survive_and_the_rest_is_exact(tmp_path):
    params = random_params(build_model(SMALL), 0)

    n_bytes = save_base(params, tmp_path)
    loaded = load_base(tmp_path)

    before, after = flatten(params), flatten(loaded)
    assert list(before) == list(after)
    for path, value in before.items():
        if path.endswith("/kernel") and "conv1d" not in path:
            codes, scale = ternarise(value)
            codes_after, scale_after = ternarise(after[path])
            np.testing.assert_array_equal(codes, codes_after)
            np.testing.assert_allclose(scale, scale_after, rtol=1e-6)
        elif path == "embed/embedding":
            np.testing.assert_array_equal(
                np.asarray(value).astype(np.float16), after[path].astype(np.float16)
            )
        else:
            np.testing.assert_array_equal(value, after[path])
    n_weights = sum(v.size for v in before.values())
    assert n_bytes < 4 * n_weights / 3


def test_logits_after_loading_are_those_of_the_model_that_was_saved(tmp_path):
    model = build_model(SMALL)
    params = random_params(model, 1)
    params["embed"]["embedding"] = params["embed"]["embedding"].astype(np.float16)
    params["embed"]["embedding"] = params["embed"]["embedding"].astype(np.float32)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)

    save_base(params, tmp_path)
    run = jax.jit(lambda params: model.apply({"params": params}, tokens))
    before = run(params)
    after = run(load_base(tmp_path))

    np.testing.assert_allclose(before, after, rtol=2e-5, atol=2e-5)


def test_the_bundled_base_fits_the_default_model():
    config = default_config("x", "tiny")
    config.data.replay = ("assets:data/replay.jsonl",)
    model = build_model(from_config_dict(config).model)
    wanted = flatten(param_shapes(model))

    found = flatten(load_base())

    assert {k: v.shape for k, v in found.items()} == {
        k: v.shape for k, v in wanted.items()
    }
    assert all(np.isfinite(v).all() for v in found.values())
