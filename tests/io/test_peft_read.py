"""PEFT folders written by hand: read as published, or refused whole."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bitmamba.io.peft_read import read_peft
from bitmamba.types import AdapterSite

D, F = 8, 14
SITES = (
    AdapterSite("layer_0/mixer/in_proj", "mamba2", "in_proj", (D, F)),
    AdapterSite("layer_0/mixer/out_proj", "mamba2", "out_proj", (F, D)),
    AdapterSite("layer_1/mixer/in_proj", "mamba2", "in_proj", (D, F)),
)
IN = "base_model.model.backbone.layers.{}.mixer.in_proj"
# As few keys as PEFT itself needs.
SETTINGS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["in_proj"],
}


def tensors():
    """Rank 4 on in_proj of both layers."""
    rng = np.random.default_rng(0)
    shapes = {"lora_A.weight": (4, D), "lora_B.weight": (F, 4)}
    return {
        f"{IN.format(layer)}.{part}": np.float32(rng.standard_normal(shape))
        for layer in (0, 1)
        for part, shape in shapes.items()
    }


@pytest.fixture
def folder(tmp_path):
    """A whole folder, to be spoilt."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS))
    file = tmp_path / "adapter_model.safetensors"
    save_file(tensors(), file, metadata={"format": "pt"})
    return tmp_path


def change(folder, **settings):
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))


def rename(folder, old, new):
    """Rename tensors by a part of their names."""
    renamed = {name.replace(old, new): value for name, value in tensors().items()}
    save_file(renamed, folder / "adapter_model.safetensors")


def test_five_settings_suffice(folder):
    got = read_peft(folder, sites=SITES)

    assert [spec.path for spec in got.specs] == [SITES[0].path, SITES[2].path]
    assert [(s.rank, s.scale, s.dropout) for s in got.specs] == [(4, 2.0, 0.0)] * 2
    assert (got.rslora, got.dora) == (False, False)
    expected = tensors()[f"{IN.format(1)}.lora_B.weight"].T
    np.testing.assert_array_equal(got.flat["layer_1/mixer/in_proj/b"], expected)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("base_model.model.", "base_model.", "prefix"),
        ("base_model.model.", "base_model.model.base_model.model.", "prefix.*once"),
        ("lora_A.weight", "lora_A.default.weight", "unknown kind of tensor"),
        ("lora_B.weight", "base_layer.weight", "save_embedding_layers=False"),
        ("layers.1.mixer", "layers.2.mixer", r"layers\.2.*nearest: .*layers\.1"),
        ("in_proj", "gate_proj", "no module .*gate_proj.*nearest"),
        ("lora_B.weight", "lora_embedding_B", "expected lora_A.weight, lora_B.weight"),
    ],
)
def test_a_tensor_that_we_would_not_use_is_refused(folder, old, new, message):
    """B088: a wrong prefix or name must not load as nothing."""
    rename(folder, old, new)

    with pytest.raises(ValueError, match=message):
        read_peft(folder, sites=SITES)


def test_a_target_without_tensors_is_refused(folder):
    """B087: a wrong name beside right ones."""
    change(folder, target_modules=["in_proj", "gate_proj"])

    with pytest.raises(ValueError, match=r"'gate_proj' has no tensor.*in_proj"):
        read_peft(folder, sites=SITES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type: got 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"r": 5}, "rank 4; expected 5"),
        ({"rank_pattern": {"layers.1.mixer.in_proj": 3}}, "rank 4; expected 3"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"use_dora": True}, "expected .*lora_magnitude_vector"),
    ],
)
def test_a_setting_that_changes_the_tensors_meaning_is_refused(
    folder, settings, message
):
    change(folder, **settings)

    with pytest.raises(ValueError, match=message):
        read_peft(folder, sites=SITES)


def test_patterns_are_those_of_peft(folder):
    change(folder, alpha_pattern={"layers.1.mixer.in_proj": 3.0, "proj": 100})

    got = read_peft(folder, sites=SITES)

    assert [spec.scale for spec in got.specs] == [2.0, 0.75]


def test_shapes_must_be_those_of_the_model(folder):
    wider = [s._replace(shape=(D + 1, F)) for s in SITES]

    with pytest.raises(ValueError, match=r"\(4, 8\).*9 inputs and 14 outputs"):
        read_peft(folder, sites=wider)


def test_a_pickle_is_not_read(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    with pytest.raises(ValueError, match=r"adapter_model\.bin is a pickle"):
        read_peft(folder, sites=SITES)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_damaged_or_missing_file_is_told_in_one_line(folder, name):
    file = folder / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="expected") as damaged:
        read_peft(folder, sites=SITES)
    file.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_peft(folder, sites=SITES)

    assert "\n" not in str(damaged.value)


def test_numbers_that_are_not_finite_are_refused(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{IN.format(0)}.lora_B.weight"][0, 0] = np.nan
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"layers\.0.*NaN"):
        read_peft(folder, sites=SITES)
