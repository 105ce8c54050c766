"""Property: any two files are adapters of the model's shapes, or one sentence."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bitmamba.io.peft_read import read_peft
from bitmamba.types import AdapterSite

SITES = (AdapterSite("layer_0/mixer/in_proj", "mamba2", "in_proj", (2, 3)),)
MODULE = "base_model.model.backbone.layers.0.mixer.in_proj"
KINDS = (np.float32, np.float16, np.float64, np.int8, bool)

numbers = st.one_of(st.integers(-3, 3), st.floats(), st.just(10**50))
values = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(max_size=6),
    st.lists(st.text(max_size=6), max_size=2),
    st.dictionaries(
        st.text("inproj_.*+(|)?\\d[]{}^$", max_size=8), numbers, max_size=2
    ),
)
names = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "bias")
names += ("lora_dropout", "use_rslora", "use_dora", "init_lora_weights", "x")
whole = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["in_proj"]}
configs = st.one_of(
    st.dictionaries(st.sampled_from(names), values, max_size=2).map(
        lambda changes: json.dumps(whole | changes).encode()
    ),
    st.binary(max_size=30),
)
parts = st.sampled_from(
    ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "x"]
)
shapes = st.sampled_from([(1, 2), (3, 1), (3,), (2, 2), (0, 2), ()])
tables = st.dictionaries(
    st.builds("{}.{}".format, st.sampled_from([MODULE, MODULE + "/..", "x"]), parts),
    st.builds(lambda shape, kind: np.ones(shape, kind), shapes, st.sampled_from(KINDS)),
    max_size=3,
)
RIGHT = {
    f"{MODULE}.lora_A.weight": np.ones((1, 2), np.float32),
    f"{MODULE}.lora_B.weight": np.ones((3, 1), np.float32),
}
weights = st.one_of(st.just(RIGHT), tables).map(save)


@given(config=configs, data=weights, cut=st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_any_folder_is_adapters_or_one_sentence(tmp_path_factory, config, data, cut):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(data[: len(data) - cut // 30])
    told = None

    try:
        found = read_peft(folder, sites=SITES)
    except ValueError as error:
        told = str(error)

    if told is not None:
        assert told.startswith(str(folder))
        assert "\n" not in told
        assert len(told) < 1000
        return
    (spec,) = found.specs
    assert found.flat[f"{spec.path}/a"].shape == (2, spec.rank)
    assert found.flat[f"{spec.path}/b"].shape == (spec.rank, 3)
    assert all(np.isfinite(leaf).all() for leaf in found.flat.values())
    assert np.isfinite(spec.scale)
    assert spec.scale > 0
    assert 0 <= spec.dropout < 1
