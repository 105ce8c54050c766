"""Settings of the guard: wrong ones are refused by name; all may change on resume."""

import dataclasses
from types import SimpleNamespace

import pytest

from bitmamba import config_read
from bitmamba.config import GuardConfig
from bitmamba.train.restore import fingerprints
from configs.base import default_config


def typed(**guard):
    config = default_config("t", "tiny").to_dict()
    config["data"]["replay"] = ("a.jsonl",)
    config["guard"] = config["guard"] | guard
    return config_read.from_config_dict(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spike_sigmas", -1.0),
        ("spike_rise", float("inf")),
        ("lr_cut", 0.0),
        ("lr_cut", 1.5),
        ("max_rollbacks", -1),
        ("stop_code", 0),
        ("stop_code", 3),
        ("stop_code", 256),
        ("stuck_s", -1.0),
    ],
)
def test_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^config\.guard\.{name}: got .*; expected "):
        typed(**{name: value})


def test_the_nearest_name_is_told():
    with pytest.raises(ValueError, match=r"did you mean .*lr_cut"):
        typed(lr_cuts=0.5)


def test_old_configurations_have_the_defaults():
    config = default_config("t", "tiny").to_dict()
    config["data"]["replay"] = ("a.jsonl",)
    del config["guard"]

    assert config_read.from_config_dict(config).guard == GuardConfig()


def test_the_guard_may_change_on_resume():
    data = SimpleNamespace(fingerprints={"tokenizer": "t"}, plan_digest="p")
    config = typed()
    other = dataclasses.replace(config, guard=GuardConfig(lr_cut=0.1))

    assert fingerprints(config, data) == fingerprints(other, data)
