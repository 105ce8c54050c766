"""How much of a device a run may use, and what is told where that is too little."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from bitmamba.config_read import from_config_dict
from bitmamba.train import device_memory
from configs import lora, sft


@pytest.mark.parametrize(
    "mine",
    [{}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}],
)
def test_most_of_a_gpu_is_claimed_unless_the_user_says_how_much(mine):
    environment = dict(mine)

    device_memory.claim_gpu(environment)

    assert environment == (mine or {"XLA_CLIENT_MEM_FRACTION": device_memory.SHARE})


def test_jaxs_share_of_a_card_of_12_gb_holds_the_goal_of_full_training():
    targets = Path(__file__).parents[2] / "scripts" / "gpu_targets"
    text = (targets / "rtx3060.txtpb").read_text("utf-8")

    size = int(re.search(r"device_memory_size: (\d+)", text)[1])

    assert 11.0 <= float(device_memory.SHARE) * size / 2**30 < 11.2


def test_the_budget_goes_before_the_device(monkeypatch):
    gpu = SimpleNamespace(
        memory_stats=lambda: {"bytes_limit": 9 * 2**30}, device_kind="some GPU"
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])

    asked, found = (device_memory.memory_limit(gb) for gb in (4, None))

    assert (asked.size, asked.setting) == (4 * 2**30, "config.memory_gb")
    assert (found.size, found.setting) == (9 * 2**30, "the device's memory")
    assert "some GPU" in found.of


def test_a_cpu_has_no_limit():
    assert device_memory.memory_limit(None) is None


def changed(config, **parts):
    """The config with settings of its parts changed."""
    made = {k: dataclasses.replace(getattr(config, k), **v) for k, v in parts.items()}
    return dataclasses.replace(config, **made)


def test_ways_to_less_name_what_is_not_done_yet():
    full = from_config_dict(sft.get_config("student_1b4"))
    ways = device_memory.ways_to_less

    assert "optim.gradient_dtype=bfloat16" in ways(full)
    assert "optim.master_dtype=bfloat16" in ways(full)
    assert "adapters (configs/lora.py)" in ways(full)
    assert not any("batch_size" in way for way in ways(full))
    one = changed(full, train={"accumulation": 1}, optim={"name": "adamw"})
    assert "optim.gradient_dtype=bfloat16" not in ways(one)
    assert "optim.name=adafactor" in ways(one)
    adapters = from_config_dict(lora.get_config("student_1b4"))
    assert [way for way in ways(adapters) if way.startswith(("optim", "adap"))] == []
    assert "a smaller data.window" in ways(adapters)
