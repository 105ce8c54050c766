"""PEFT folders: the published layout, and exact round trips."""

import json
import math

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from bitmamba.io.peft import alpha_of, module_name, write_peft
from bitmamba.io.peft_read import as_slices, read_peft
from bitmamba.types import AdapterSite, AdapterSpec

D, F, V = 8, 14, 11
SLICES = (("z", 0, 5), ("x", 5, 10), ("dt", 10, 14))
SITES = (
    AdapterSite("embed", "embed", "embed", (V, D)),
    AdapterSite("layer_0/mixer/in_proj", "mamba2", "in_proj", (D, F), SLICES),
    AdapterSite("layer_0/mixer/out_proj", "mamba2", "out_proj", (F, D)),
    AdapterSite("layer_1/mixer/in_proj", "mamba2", "in_proj", (D, F), SLICES),
    AdapterSite("lm_head", "head", "lm_head", (D, V)),
)
IN = "base_model.model.backbone.layers.{}.mixer.in_proj"


def whole(site, rank=4, scale=2.0, magnitude=False):
    return AdapterSpec(
        site.path, site.path, site.shape, 0, rank, scale, 0.05, magnitude
    )


def of_slice(site, name, rank=2, scale=2.0, magnitude=False):
    (edges,) = [(start, stop) for n, start, stop in site.slices if n == name]
    shape = (site.shape[0], edges[1] - edges[0])
    path = f"{site.path}/{name}"
    return AdapterSpec(path, site.path, shape, edges[0], rank, scale, 0.0, magnitude)


def leaves(specs):
    rng = np.random.default_rng(0)
    flat = {}
    for spec in specs:
        shapes = {"a": (spec.shape[0], spec.rank), "b": (spec.rank, spec.shape[1])}
        if spec.magnitude:
            shapes["magnitude"] = (spec.shape[1],)
        for name, shape in shapes.items():
            flat[f"{spec.path}/{name}"] = np.float32(rng.standard_normal(shape))
    return flat


def weight(site):
    """The value of a base's weight."""
    rng = np.random.default_rng(len(site))
    return np.float32(rng.standard_normal((D, F)))


def write(folder, specs, flat=None, *, sites=SITES, rslora=False):
    flat = leaves(specs) if flat is None else flat
    written = write_peft(
        folder, specs, flat, sites=sites, rslora=rslora, base="base", weight=weight
    )
    return flat, written


def settings_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def test_keys_and_shapes_are_exactly_those_of_peft(tmp_path):
    """B091: one prefix, and no adapter name."""
    flat, written = write(tmp_path, [whole(site) for site in SITES])

    with safe_open(tmp_path / "adapter_model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
        a = file.get_tensor(f"{IN.format(1)}.lora_A.weight")
    root = "base_model.model.backbone"
    assert shapes == {
        f"{root}.embeddings.lora_embedding_A": (4, V),
        f"{root}.embeddings.lora_embedding_B": (D, 4),
        f"{root}.layers.0.mixer.in_proj.lora_A.weight": (4, D),
        f"{root}.layers.0.mixer.in_proj.lora_B.weight": (F, 4),
        f"{root}.layers.0.mixer.out_proj.lora_A.weight": (4, F),
        f"{root}.layers.0.mixer.out_proj.lora_B.weight": (D, 4),
        f"{root}.layers.1.mixer.in_proj.lora_A.weight": (4, D),
        f"{root}.layers.1.mixer.in_proj.lora_B.weight": (F, 4),
        "base_model.model.lm_head.lora_A.weight": (4, D),
        "base_model.model.lm_head.lora_B.weight": (V, 4),
    }
    assert written.names == tuple(sorted(shapes))
    np.testing.assert_array_equal(a.T, flat["layer_1/mixer/in_proj/a"])


def test_settings_name_the_usual_rank_and_the_exceptions(tmp_path):
    specs = [whole(SITES[1]), whole(SITES[3]), whole(SITES[4], rank=6, scale=0.5)]

    write(tmp_path, specs)

    settings = settings_of(tmp_path)
    usual = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    assert usual.items() <= settings.items()
    assert settings["target_modules"] == ["in_proj", "lm_head"]
    assert settings["rank_pattern"] == {"lm_head": 6}
    assert settings["alpha_pattern"] == {"lm_head": 3}
    assert settings["lora_dropout"] == 0.05
    assert (settings["use_rslora"], settings["use_dora"]) == (False, False)
    assert settings["base_model_name_or_path"] == "base"


def test_a_layer_without_adapter_is_no_target(tmp_path):
    write(tmp_path, [whole(SITES[3])])

    targets = settings_of(tmp_path)["target_modules"]
    assert targets == ["backbone.layers.1.mixer.in_proj"]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_round_trip_of_whole_weights_is_bit_equal(tmp_path, rslora, dora):
    scale = 32 / math.sqrt(6) if rslora else 32 / 6
    specs = [whole(site, 6, scale, dora) for site in SITES[1:4]]
    flat, _ = write(tmp_path, specs, rslora=rslora)

    got = read_peft(tmp_path, sites=SITES)

    assert got.specs == tuple(specs)
    assert (got.rslora, got.dora) == (rslora, dora)
    assert set(got.alphas.values()) == {32.0}
    assert_same(got.flat, flat)
    assert_same(as_slices(got, specs), flat)


@pytest.mark.parametrize("dora", [False, True])
def test_slices_become_one_adapter_of_the_same_function_and_come_back(tmp_path, dora):
    site = SITES[1]
    specs = [
        of_slice(site, "x", 2, 2.0, dora),
        of_slice(site, "dt", 3, 0.5, dora),
        whole(SITES[3], 4, 1.0, dora),
    ]
    flat, written = write(tmp_path, specs)

    got = read_peft(tmp_path, sites=SITES)

    (wide, _) = got.specs
    assert (wide.path, wide.rank, wide.shape) == (site.path, 5, (D, F))
    a, b = (np.float64(got.flat[f"{site.path}/{leaf}"]) for leaf in "ab")
    delta = np.zeros((D, F))
    for spec in specs[:2]:
        one, two = (np.float64(flat[f"{spec.path}/{leaf}"]) for leaf in "ab")
        columns = slice(spec.start, spec.start + spec.shape[1])
        delta[:, columns] = spec.scale * one @ two
    np.testing.assert_allclose(wide.scale * a @ b, delta, rtol=0, atol=1e-12)
    if dora:
        lengths = got.flat[f"{site.path}/magnitude"]
        free = np.linalg.norm(np.float64(weight(site.path))[:, :5], axis=0)
        np.testing.assert_allclose(lengths[:5], free, rtol=1e-6)
    assert_same(as_slices(got, specs), flat)
    assert "1 weights adapted by slices" in " ".join(written.notes)


def test_a_scale_that_does_not_fold_exactly_is_said(tmp_path):
    specs = [of_slice(SITES[1], "x", scale=1.0), of_slice(SITES[1], "dt", scale=0.3)]
    flat, written = write(tmp_path, specs)

    back = as_slices(read_peft(tmp_path, sites=SITES), specs)

    assert any("layer_0/mixer/in_proj/dt" in note for note in written.notes)
    for path, value in flat.items():
        np.testing.assert_allclose(back[path], value, rtol=2e-7)


def test_notes_say_what_peft_refuses_and_what_has_no_class(tmp_path):
    """B084: PEFT takes no adapter on out_proj of mamba2."""
    attention = AdapterSite("layer_2/mixer/q_proj", "attention", "q_proj", (D, D))

    _, plain = write(tmp_path / "a", [whole(SITES[1])])
    _, out = write(tmp_path / "b", [whole(SITES[2])])
    hybrid = (*SITES, attention)
    _, mixed = write(tmp_path / "c", [whole(attention)], sites=hybrid)

    assert plain.notes == ()
    assert ["out_proj" in note for note in out.notes] == [True]
    assert ["attention, mamba2" in note for note in mixed.notes] == [True]


@pytest.mark.parametrize("rank", [1, 3, 7, 16, 48])
@pytest.mark.parametrize("alpha", [1, 0.3, 16, 32, 33.3])
@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_gives_back_the_scale_to_the_bit(rank, alpha, rslora):
    divisor = math.sqrt(rank) if rslora else rank

    got = alpha_of(alpha / divisor, rank, rslora=rslora)

    assert got / divisor == alpha / divisor
    assert got == alpha


def test_a_leaf_that_peft_has_no_form_for_is_refused(tmp_path):
    specs = [whole(SITES[1])]
    for leaf in ("layer_0/mixer/A_log", "layer_0/mixer/state_offset"):
        flat = leaves(specs) | {leaf: np.zeros(3, np.float32)}
        with pytest.raises(ValueError, match=f"{leaf}.*--as=merged"):
            write(tmp_path, specs, flat)
    with pytest.raises(ValueError, match="got no adapter"):
        write(tmp_path, [])


def test_values_outside_the_slices_are_not_dropped(tmp_path):
    specs = [of_slice(SITES[1], "x"), of_slice(SITES[1], "dt")]
    write(tmp_path, specs)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{IN.format(0)}.lora_B.weight"][0, 0] = 1e-20
    save_file(tensors, file, metadata={"format": "pt"})

    got = read_peft(tmp_path, sites=SITES)

    with pytest.raises(ValueError, match="outside the slices"):
        as_slices(got, specs)
    with pytest.raises(ValueError, match="rank 4; expected 2"):
        as_slices(got, specs[:1])
    with pytest.raises(ValueError, match=r"layer_1.*the run alone"):
        as_slices(got, [*specs, whole(SITES[3])])


def test_names_follow_mamba2_of_transformers():
    names = [module_name(site.path) for site in SITES]

    assert names == [
        "backbone.embeddings",
        "backbone.layers.0.mixer.in_proj",
        "backbone.layers.0.mixer.out_proj",
        "backbone.layers.1.mixer.in_proj",
        "lm_head",
    ]
