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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": True}, "r: got True"),
        ({"r": 4.0}, "r: got 4.0"),
        ({"r": 10**30}, "r: got 1000"),
        ({"lora_alpha": float("nan")}, "lora_alpha: got nan; expected a finite"),
        ({"lora_alpha": float("inf")}, "lora_alpha: got inf; expected a finite"),
        ({"lora_alpha": -1}, "lora_alpha: got -1"),
        ({"lora_dropout": "x"}, "lora_dropout: got 'x'"),
        ({"lora_dropout": [1]}, "lora_dropout"),
        ({"lora_dropout": float("nan")}, "lora_dropout: got nan"),
        ({"use_rslora": "false"}, "use_rslora: got 'false'"),
        ({"rank_pattern": [1]}, "rank_pattern: got .1."),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: got '.'; expected a regular"),
        ({"alpha_pattern": {"in_proj": "9"}}, "in_proj: got '9'"),
        ({"target_modules": [["in_proj"]]}, "target_modules: got"),
        ({"target_modules": 5}, "target_modules: got 5"),
        ({"target_modules": ["x" * 2_000_000]}, "has no tensor"),
        ({"peft_type": ["LORA"] * 999}, "peft_type: got"),
        ({"x": "y" * 5_000_000}, "expected at most 4,194,304"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_settings_of_a_wrong_kind_are_one_line(folder, settings, message):
    change(folder, **settings)

    with pytest.raises(ValueError, match=message) as error:
        read_peft(folder, sites=SITES)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+",
        "(.*)*x",
        ".?" * 40 + "x",
        "(.|.)" * 30 + "x",
        "(x+x+)+y",
        "a" * 101 + "*",
    ],
)
def test_a_pattern_that_could_match_for_ever_is_refused(folder, pattern):
    change(folder, rank_pattern={pattern: 4})

    with pytest.raises(ValueError, match=r"rank_pattern: got .*repetitions"):
        read_peft(folder, sites=SITES)


@pytest.mark.parametrize("pattern", [r"layers\.\d+\.mixer\.(in|out)_proj", "in_proj"])
def test_patterns_that_people_write_are_taken(folder, pattern):
    change(folder, alpha_pattern={pattern: 2.0})

    assert read_peft(folder, sites=SITES).specs[0].scale == 0.5


@pytest.mark.parametrize("text", ["[" * 99_999, '{"peft_type":' * 5000, "\ud800", "1"])
def test_any_other_text_for_settings_is_one_line(folder, text):
    (folder / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))

    with pytest.raises(ValueError, match=r"adapter_config\.json: "):
        read_peft(folder, sites=SITES)


@pytest.mark.parametrize("value", [np.ones((4, D), np.int32), np.ones((4, D), bool)])
def test_tensors_that_are_no_floats_are_refused(folder, value):
    kept = tensors() | {f"{IN.format(0)}.lora_A.weight": value}
    save_file(kept, folder / "adapter_model.safetensors")

    with pytest.raises(ValueError, match=r"lora_A\.weight: got dtype"):
        read_peft(folder, sites=SITES)


def test_values_beyond_float32_are_refused(folder):
    kept = {name: value.astype(np.float64) for name, value in tensors().items()}
    kept[f"{IN.format(1)}.lora_A.weight"][0, 0] = 1e300
    save_file(kept, folder / "adapter_model.safetensors")

    with pytest.raises(ValueError, match=r"layers\.1.*NaN or infinity"):
        read_peft(folder, sites=SITES)


def test_names_and_paths_of_the_folder_open_nothing(folder, monkeypatch):
    """No string in the folder is taken for a file: only the two files are opened."""
    import builtins
    import io

    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    change(
        folder,
        base_model_name_or_path=str(outside),
        revision="../../outside",
        auto_mapping={"parent_library": "os"},
        peft_version="file:///etc/passwd",
    )
    opened = []
    real = io.open

    def spy(file, *args, **kwargs):
        opened.append(str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", spy)
    monkeypatch.setattr(builtins, "open", spy)
    read_peft(folder, sites=SITES)
    assert set(opened) <= {str(f) for f in folder.iterdir()}

    rename(folder, "layers.0.mixer", "layers.0/../../../outside")
    with pytest.raises(ValueError, match="the model has no module"):
        read_peft(folder, sites=SITES)


def test_a_rank_beyond_the_weight_is_refused_unread(folder):
    rank = D + F + 1
    wide = {"lora_A.weight": (rank, D), "lora_B.weight": (F, rank)}
    kept = {
        f"{IN.format(0)}.{part}": np.zeros(s, np.float32) for part, s in wide.items()
    }
    save_file(kept, folder / "adapter_model.safetensors")
    change(folder, r=rank)

    with pytest.raises(ValueError, match="rank 23; expected at most 22"):
        read_peft(folder, sites=SITES)
