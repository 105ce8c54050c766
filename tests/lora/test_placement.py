"""Placement: presets, names, switches and rules; what matches nothing is an error."""

import contextlib

import pytest

from bitmamba.config import (
    LAYER_SYMBOLS,
    AttentionConfig,
    BitMamba2Config,
    LoraConfig,
    LoraRule,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
)
from bitmamba.lora.coverage import coverage
from bitmamba.lora.placement import check_ranks, place_adapters
from bitmamba.models import build_model, param_shapes
from bitmamba.models.sites import adapter_sites


def sites_of(pattern, **changes):
    cfg = ModelConfig(
        vocab_size=48,
        d_model=16,
        layers=tuple(LAYER_SYMBOLS[s] for s in pattern),
        mamba2=Mamba2Config(headdim=8, n_groups=2, d_state=4),
        bitmamba2=BitMamba2Config(n_heads=4),
        attention=AttentionConfig(n_heads=4, n_kv_heads=2, headdim=8),
        mlp=MLPConfig(d_ff=24),
        **changes,
    )
    return adapter_sites(cfg, param_shapes(build_model(cfg)))


HYBRID = sites_of("MB*-M")


def placed(sites=HYBRID, **settings):
    return [spec.path for spec in place_adapters(LoraConfig(**settings), sites)]


def test_every_projection_of_every_layer_is_a_site():
    names = [f"{site.kind} {site.path}" for site in HYBRID]

    assert names == [
        "embed embed",
        "mamba2 layer_0/mixer/in_proj",
        "mamba2 layer_0/mixer/out_proj",
        "bitmamba2 layer_1/mixer/in_proj",
        "bitmamba2 layer_1/mixer/out_proj",
        "attention layer_2/mixer/k_proj",
        "attention layer_2/mixer/o_proj",
        "attention layer_2/mixer/q_proj",
        "attention layer_2/mixer/v_proj",
        "mlp layer_3/mixer/down_proj",
        "mlp layer_3/mixer/gate_proj",
        "mlp layer_3/mixer/up_proj",
        "mamba2 layer_4/mixer/in_proj",
        "mamba2 layer_4/mixer/out_proj",
        "head lm_head",
    ]


@pytest.mark.parametrize("pattern", ["M", "B"])
def test_slices_of_in_proj_cover_its_columns_in_order(pattern):
    site = next(s for s in sites_of(pattern) if s.projection == "in_proj")

    names, starts, stops = zip(*site.slices, strict=True)

    assert names == ("z", "x", "B", "C", "dt")
    assert starts == (0, *stops[:-1])
    assert stops[-1] == site.shape[1]


def test_a_tied_model_has_no_head_of_its_own():
    paths = [site.path for site in sites_of("M", tie_embeddings=True)]

    assert "embed" in paths
    assert "lm_head" not in paths


PER_KIND = {
    "attention": [f"layer_2/mixer/{n}_proj" for n in "koqv"],
    "mlp": [f"layer_3/mixer/{n}_proj" for n in ("down", "gate", "up")],
    "ssm": [f"layer_{i}/mixer/{n}_proj" for i in (0, 1, 4) for n in ("in", "out")],
}


@pytest.mark.parametrize("preset", PER_KIND)
def test_a_preset_takes_all_projections_of_its_layers(preset):
    assert placed(place=(preset,)) == PER_KIND[preset]


def test_all_takes_every_layer_but_neither_embedding_nor_head():
    everything = [s.path for s in HYBRID if s.path.startswith("layer")]

    assert placed(place=("all",)) == everything
    assert set(placed(place=("all",), skip_ssm=True)) == set(everything) - set(
        PER_KIND["ssm"]
    )


def test_names_of_projections_and_slices_and_presets_add_up():
    found = placed(place=("mlp", "in_proj.dt", "lm_head"))

    slices = [f"layer_{i}/mixer/in_proj/dt" for i in (0, 1, 4)]
    assert found == [*slices[:2], *PER_KIND["mlp"], slices[2], "lm_head"]


def test_rules_set_rank_and_alpha_of_what_is_placed_and_take_places_away():
    rules = (
        LoraRule(pattern=r"layer_0/.*", rank=4, alpha=2.0),
        LoraRule(pattern=r".*/out_proj", rank=0),
        LoraRule(pattern=r".*in_proj", dropout=0.5),
    )

    specs = place_adapters(LoraConfig(place=("ssm",), rules=rules), HYBRID)

    by_path = {s.path: (s.rank, s.scale, s.dropout) for s in specs}
    assert by_path == {
        "layer_0/mixer/in_proj": (4, 0.5, 0.0),
        "layer_0/mixer/out_proj": (4, 0.5, 0.0),
        "layer_1/mixer/in_proj": (16, 2.0, 0.5),
        "layer_4/mixer/in_proj": (16, 2.0, 0.5),
    }


def test_rules_alone_place_and_a_slice_must_be_meant():
    everywhere = placed(place=(), rules=(LoraRule(pattern=".*in_proj.*"),))
    slices = placed(place=(), rules=(LoraRule(pattern=r".*/in_proj/(x|dt)"),))

    assert everywhere == [f"layer_{i}/mixer/in_proj" for i in (0, 1, 4)]
    assert slices == [
        f"layer_{i}/mixer/in_proj/{n}" for i in (0, 1, 4) for n in ("x", "dt")
    ]


def test_the_scale_is_alpha_over_rank_or_over_its_root():
    plain, root = (
        place_adapters(LoraConfig(place=("mlp",), rank=4, alpha=8.0, rslora=r), HYBRID)
        for r in (False, True)
    )

    assert {s.scale for s in plain} == {2.0}
    assert {s.scale for s in root} == {4.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"place": ("in_proj", "gate_porj")},
            r"place\[1\]: 'gate_porj'.*did you mean gate_proj",
        ),
        (
            {"place": ("attention",), "sites": "M"},
            r"'attention' places no adapter; exp",
        ),
        (
            {"place": ("ssm",), "skip_ssm": True},
            r"'ssm' places no adapter: config.lora.skip_ssm=True removes (?!.*mean)",
        ),
        ({"place": ("lm_head",), "sites": "tied"}, r"'lm_head' places no adapter"),
        ({"place": ("in_proj.q",)}, r"'in_proj.q' places no adapter"),
        ({"rules": (LoraRule(pattern="layer_9/.*"),)}, r"rules\[0\].pattern: 'layer_9"),
        (
            {"rules": (LoraRule(pattern=".*"), LoraRule(pattern=".*out_proj"))},
            r"rules\[1\]",
        ),
        ({"place": ()}, "got no adapter at all"),
        ({"rules": (LoraRule(pattern=".*", rank=0),)}, "got no adapter at all"),
        ({"place": ("in_proj", "in_proj.x")}, "adapted whole and by its slice"),
        ({"place": ("all", "lm_head"), "dora": True}, "lm_head cannot learn"),
        # The convolution is no projection: refused here, not when it is merged.
        ({"place": ("conv1d",)}, "'conv1d' places no adapter"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_places_nothing_is_an_error_that_lists_what_exists(settings, message):
    kinds = {"M": sites_of("M"), "tied": sites_of("M", tie_embeddings=True)}
    settings = dict(settings)
    sites = kinds.get(settings.pop("sites", ""), HYBRID)

    with pytest.raises(ValueError, match=message) as error:
        placed(sites, **settings)

    text = str(error.value)
    assert "\n" not in text
    if "places no adapter" in text or "at all" in text:
        assert "mamba2: in_proj, in_proj.z, in_proj.x" in text


def test_a_rank_above_a_side_is_refused_and_a_slice_goes_by_its_projection():
    place = ("out_proj", "in_proj.dt", "gate_proj")
    for rank, refused in ((16, False), (17, True)):
        specs = place_adapters(LoraConfig(place=place, rank=rank), HYBRID)
        told = pytest.raises(ValueError, match=r"got 17 for layer_0/mixer/in_proj \(16")
        with told if refused else contextlib.nullcontext():
            check_ranks(specs, HYBRID)


def test_without_adapters_something_else_may_train():
    assert placed(place=(), train=(".*/A_log",)) == []
    assert placed(place=(), state_offset=True) == []


def test_coverage_counts_layers_and_parameters_of_each_projection():
    cfg = LoraConfig(
        place=("in_proj.x", "in_proj.dt", "q_proj"),
        rank=4,
        rules=(LoraRule(pattern="layer_4/.*", rank=2),),
    )

    rows = coverage(HYBRID, place_adapters(cfg, HYBRID))

    found = {(r.kind, r.projection): r for r in rows}
    assert len(found) == 13
    ssm = found["mamba2", "in_proj"]
    assert (ssm.adapted, ssm.there, ssm.columns) == (2, 2, ("x", "dt"))
    assert ssm.ranks == (2, 4)
    # x has 32 columns, dt 4; ranks 4 and 2 in the two layers.
    assert ssm.parameters == 6 * (16 + 32) + 6 * (16 + 4)
    assert found["attention", "q_proj"].parameters == 4 * (16 + 32)
    untouched = found["mlp", "up_proj"]
    assert (untouched.adapted, untouched.there, untouched.parameters) == (0, 1, 0)
