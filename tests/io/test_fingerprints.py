import copy
import json

import pytest

from bitmamba.io.fingerprints import check_fingerprints

CHANGES = {
    "data.b.jsonl": lambda f: f["data"].update({"b.jsonl": "changed"}),
    "data.c.jsonl": lambda f: f["data"].update({"c.jsonl": "new"}),
    "data.a.jsonl": lambda f: f["data"].pop("a.jsonl"),
    "tokenizer": lambda f: f.update(tokenizer="changed"),
    "template": lambda f: f.update(template="changed"),
    "plan": lambda f: f.update(plan="changed"),
    "model.d_model": lambda f: f["model"].update(d_model=8),
    "model.layers": lambda f: f["model"].update(layers=("mamba2",)),
    "optim.name": lambda f: f["optim"].update(name="adafactor"),
}


def test_equal_after_json(toy):
    check_fingerprints(json.loads(json.dumps(toy.FINGERPRINTS)), toy.FINGERPRINTS)


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_is_refused_by_name(toy, field):
    now = copy.deepcopy(toy.FINGERPRINTS)
    CHANGES[field](now)

    with pytest.raises(ValueError, match=f"^where: {field} changed: got ") as error:
        check_fingerprints(toy.FINGERPRINTS, now, where="where")

    assert "\n" not in str(error.value)
    assert "; expected " in str(error.value)


def test_all_changes_are_named(toy):
    now = {**toy.FINGERPRINTS, "plan": "x", "tokenizer": "y"}

    with pytest.raises(ValueError, match=r"plan changed.*\(also changed: tokenizer\)"):
        check_fingerprints(toy.FINGERPRINTS, now)


@pytest.mark.parametrize("field", CHANGES)
def test_restore_refuses_and_keeps_the_step(toy, field, open_checkpointer):
    first = open_checkpointer()
    toy.save(first, 1)
    assert first.wait() is None
    now = copy.deepcopy(toy.FINGERPRINTS)
    CHANGES[field](now)

    second = open_checkpointer(fingerprints=now)

    with pytest.raises(ValueError, match=f"{field} changed"):
        toy.restore(second)
    assert second.last_good() == 1
