"""The fuzzer's targets hold on its seeds, on spoilt ones and on what it once found.

What is asserted lies in the targets: of anything but a sentence they make an error.
"""

import pytest

from scripts.fuzz_seeds import SEEDS
from scripts.fuzz_targets import TARGETS

# Inputs that once raised something else, made smaller.
FOUND: dict[str, list[bytes]] = {
    "template": [b"|{% generation %}{% endgeneration %}"],
    "meta": [
        b'{"format":1,"step":3,"config":{},"fingerprints":{},"versions":{},"extra":{},'
        b'"digests":{"trainable":{},"opt_state":{}},"frozen":{"digests":{}}}',
    ],
}


@pytest.fixture
def target(monkeypatch, tmp_path):
    from bitmamba.data import jinja_render
    from scripts import fuzz_targets

    monkeypatch.setattr(fuzz_targets, "_FOLDER", tmp_path)
    monkeypatch.setattr(fuzz_targets, "_limit_memory", lambda: None)
    for name in ("MAX_STEPS", "MAX_OUTPUT_CHARS"):  # targets lower them
        monkeypatch.setattr(jinja_render, name, getattr(jinja_render, name))
    return TARGETS.__getitem__


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_spoilt_ones_break_no_promise(target, name):
    for seed in SEEDS[name]:
        target(name)(seed)
        for at in range(0, len(seed), max(1, len(seed) // 15)):
            target(name)(seed[:at])
            target(name)(seed[:at] + b"\xff" + seed[at + 1 :])


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(target, name):
    for data in FOUND[name]:
        target(name)(data)


def test_every_target_has_seeds():
    assert SEEDS.keys() == TARGETS.keys()
    assert all(SEEDS.values())
