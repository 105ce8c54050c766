"""What the user typed becomes a Config, or one line that says what is wrong."""

import copy
import json

import pytest

from bitmamba import config_read
from bitmamba.config import Config, Rule
from configs.base import default_config


def typed(**changes):
    """The sft defaults with {"optim.lr": ...} changes, as plain data."""
    config = default_config("t", "tiny").to_dict()
    config["data"]["replay"] = ("a.jsonl",)
    for path, value in changes.items():
        *groups, name = path.replace("__", ".").split(".")
        part = config
        for group in groups:
            part = part.setdefault(group, {})
        part[name] = value
    return config


def test_defaults_resolve_to_frozen_dataclasses():
    config = config_read.from_config_dict(typed())

    assert isinstance(config, Config)
    assert config.model.layers[:3] == ("mamba2", "mamba2", "attention")
    assert config.optim.rules == (Rule(pattern=".*"),)


def test_a_layer_list_and_a_pattern_string_mean_the_same():
    by_name = typed(model__layers=["mamba2", "mlp"])
    by_symbol = typed(model__layers="M-")

    a, b = map(config_read.from_config_dict, (by_name, by_symbol))

    assert a == b


def test_json_round_trip_is_exact():
    config = config_read.from_config_dict(typed(optim__clamp=1.0, data__min_score=None))

    text = json.dumps(config_read.to_json(config), allow_nan=False)

    assert config_read.from_config_dict(json.loads(text)) == config


def test_comma_separated_paths_become_a_list():
    config = config_read.from_config_dict(typed(data__sft=("a.jsonl,b.jsonl",)))

    assert config.data.sft == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize("text", ["", "none", "None"])
def test_flags_can_unset_an_optional_text(text):
    config = config_read.from_config_dict(typed(checkpoint__init_from=text))

    assert config.checkpoint.init_from is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1.0}, r"config\.learning_rate: unknown setting"),
        ({"optim.lrr": 1.0}, r"config\.optim\.lrr: unknown setting.*'lr'"),
        ({"optim.lr": float("nan")}, r"config\.optim\.lr: got nan"),
        ({"optim.lr": float("inf")}, r"config\.optim\.lr: got inf"),
        ({"optim.lr": 0.0}, r"config\.optim\.lr: got 0; expected a number above 0"),
        ({"optim.lr": "1e-3"}, r"config\.optim\.lr: got '1e-3'; expected a number"),
        ({"optim.adafactor.eps1": (1e-30,)}, r"eps1: got \(1e-30,\)"),
        ({"optim.name": "adam"}, "expected one of adafactor, adamw"),
        ({"optim.gradient_dtype": "float16"}, "expected one of float32, bfloat16"),
        ({"optim.master_dtype": "int8"}, "expected one of float32, bfloat16"),
        (
            {"optim.master_dtype": "bfloat16", "train.mode": "lora"},
            "with train.mode=lora; expected train.mode=full",
        ),
        (
            {"optim.master_dtype": "bfloat16", "loss.pull": 0.1},
            r"with loss\.pull=0\.1; expected no pull",
        ),
        ({"optim.rules": ({"pattern": "("},)}, r"rules\[0\]\.pattern"),
        ({"optim.rules": ({"patern": "."},)}, r"rules\[0\]\.patern: unknown setting"),
        ({"train.steps": -5}, r"config\.train\.steps: got -5; expected at least 1"),
        ({"train.steps": 2.5}, r"config\.train\.steps: got 2\.5; expected int"),
        ({"train.steps": True}, r"config\.train\.steps: got True"),
        ({"train.mode": "prefix"}, "expected one of full, head_only"),
        ({"model.layers": "MX"}, "unknown symbol 'X'"),
        ({"model.layers": ""}, "got no layer"),
        ({"model.layers": ["mamba3"]}, r"layers\[0\]: got 'mamba3'"),
        ({"model.mamba2.headdim": 7}, "expected a divisor of d_inner = 512"),
        ({"model.dtype": "float16"}, "expected one of float32, bfloat16"),
        ({"model.attention.n_kv_heads": 3}, "expected a divisor of n_heads = 4"),
        ({"data.replay": ()}, "got no training files"),
        ({"data.replay_share": 1.0}, "replay_share: got 1"),
        ({"data.window": 1}, "window: got 1; expected at least 2"),
        ({"data.window": 10**9}, "window: got 1000000000 tokens; expected at most"),
        ({"data.min_score": float("inf")}, "min_score: got inf; expected a finite"),
        ({"data.sft": "a.jsonl"}, "expected a list"),
        ({"model.layers": None}, r"model\.layers: got None; expected a list of names"),
        ({"optim.lr": 10**400}, r"optim\.lr: got a whole number of 1329 bits"),
        ({"eval.every": 0}, r"config\.eval\.every: got 0"),
        ({"kernels": "triton"}, "expected one of auto, reference, pallas"),
        ({"workdir": " "}, "expected a folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_that_names_the_setting(changes, message):
    config = typed()
    for path, value in changes.items():
        *groups, name = path.split(".")
        part = config
        for group in groups:
            part = part[group]
        part[name] = value
    before = copy.deepcopy(config)

    with pytest.raises(ValueError, match=message) as error:
        config_read.from_config_dict(config)

    assert "\n" not in str(error.value)
    assert config == before


def test_head_only_on_a_tied_head_is_refused():
    # B093: training a tied head would change the embedding.
    config = typed(train__mode="head_only", model__tie_embeddings=True)

    with pytest.raises(ValueError, match="tie_embeddings"):
        config_read.from_config_dict(config)


def test_a_configuration_is_not_written_through_a_link(tmp_path):
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "config.json").symlink_to(tmp_path / "outside")

    with pytest.raises(ValueError, match=r"config\.json: a link"):
        config_read.write_json(
            config_read.from_config_dict(typed()), tmp_path / "config.json"
        )

    assert (tmp_path / "outside").read_text() == "precious"
