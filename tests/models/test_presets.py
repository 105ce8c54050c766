import dataclasses

import pytest

from bitmamba.config import LAYER_SYMBOLS, ModelConfig
from bitmamba.models import build_model, count_params, param_shapes
from configs.overridable import as_config_dict
from configs.presets import PRESETS, get_model


def _config(name, **changes):
    preset = get_model(name)
    layers = tuple(LAYER_SYMBOLS[s] for s in preset.layers)
    return dataclasses.replace(preset, layers=layers, **changes)


COUNTS = [
    ("tiny", {}, 4_415_840),
    ("bitmamba2_255m", {}, 255_472_384),
    ("bitmamba2_1b", {}, 1_018_439_680),
    ("student_1b4", {}, 1_446_620_160),
    ("student_1b4", {"norm_placement": "linear"}, 1_446_622_208),
]


@pytest.mark.parametrize(("name", "changes", "count"), COUNTS)
def test_parameter_counts(name, changes, count):
    assert count_params(build_model(_config(name, **changes))) == count


def test_the_public_preset_has_the_public_shapes():
    shapes = param_shapes(build_model(_config("bitmamba2_255m")))

    mixer = shapes["layer_23"]["mixer"]
    assert set(shapes["layer_0"]) == {"mixer"}
    assert mixer["in_proj"]["kernel"].shape == (1024, 4144)
    assert mixer["in_proj"]["norm"]["scale"].shape == (1024,)
    assert mixer["out_proj"]["norm"]["scale"].shape == (2048,)
    assert mixer["conv1d"]["kernel"].shape == (4, 2048)
    assert mixer["D"].shape == (2048,)
    assert mixer["A_log"].shape == mixer["dt_bias"].shape == (16,)
    assert shapes["lm_head"]["norm"]["scale"].shape == (1024,)
    assert shapes["lm_head"]["kernel"].shape == (1024, 50257)
    assert "norm" not in mixer


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_field_can_be_overridden(name):
    def keys(cls):
        sub = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        return {
            k: keys(v) if dataclasses.is_dataclass(v) else None for k, v in sub.items()
        }

    def plain(values):
        return {k: plain(v) if isinstance(v, dict) else None for k, v in values.items()}

    assert plain(as_config_dict(get_model(name)).to_dict()) == keys(ModelConfig)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"got 'tinny'; expected one of tiny, bitmamba2"
    ):
        get_model("tinny")
