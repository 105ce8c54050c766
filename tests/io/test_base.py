"""The bundled form of a model: small, lossless in what the model computes."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w/kernel.columns": None}, r"w/kernel: got .*columns uint8\[0\]"),
        ({"w/kernel.codes": None}, r"w/kernel\.(scale|columns): got it without"),
        ({"w/kernel.columns": np.ones(2, np.int32)}, "one int32 and one float32"),
        ({"w/kernel.columns": np.int32(-3)}, "at least one column"),
        ({"w/kernel.columns": np.int32(2**30)}, r"expected 268435456 for"),
        ({"w/kernel.scale": np.float32("nan")}, "a finite scale > 0"),
        ({"w/kernel.scale": np.float32(-1)}, "a finite scale > 0"),
        ({"w/kernel.codes": np.ones((2, 1), np.float32)}, "expected uint8 codes"),
        ({"w/kernel.codes": np.uint8(3)}, "expected uint8 codes"),
        ({"w/kernel.codes": np.full((2, 1), 255, np.uint8)}, "got the code 3"),
        ({"w": np.ones(3, np.float32)}, "no part of another"),
        ({"/": np.ones(3, np.float32)}, "no part of another"),
    ],
)
def test_a_damaged_base_is_one_line(tmp_path, change, message):
    save_base({"w": {"kernel": np.ones((2, 4), np.float32)}}, tmp_path)
    file = tmp_path / "model.safetensors"
    kept = load_file(file) | change
    save_file({n: np.asarray(v) for n, v in kept.items() if v is not None}, file)

    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{message}"):
        load_base(tmp_path)

    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: got .* bytes"):
        load_base(tmp_path)
