"""Runs to PEFT folders and back."""

import dataclasses
import json

import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config_read import from_config_dict
from bitmamba.io import digests
from bitmamba.io.runs import load_run
from bitmamba.lora.merge import merge_float
from bitmamba.train import exchange, merging
from bitmamba.train.build import run_model
from configs import sft


def assert_same_bits(first, second):
    assert digests.tree_digests(first) == digests.tree_digests(second)


def test_peft_folder_gives_back_the_run(made, adapter_run, tmp_path):
    """B088: exported, read back, and equal to the trained model, not to the base."""
    written = exchange.export_peft(adapter_run, tmp_path / "peft")
    assert any("the base is ternary" in note for note in written.notes)

    base = str(made.folder / "base")
    # The folder names it, but that lies elsewhere: a path in a file is not followed.
    with pytest.raises(ValueError, match=r"nor beside it.*--base"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back")
    n = exchange.import_peft(tmp_path / "peft", tmp_path / "back", base=base)

    tree, found = load_run(tmp_path / "back", base=base)
    assert n == len(adapter_run.model.adapters)
    assert_same_bits(tree, adapter_run.tree)
    config = from_config_dict(found)
    assert run_model(config).adapters == adapter_run.model.adapters
    assert dataclasses.replace(config, workdir="") == dataclasses.replace(
        made.config, workdir=""
    )


def test_a_foreign_peft_folder_stands_beside_the_base_that_is_named(
    made, adapter_run, tmp_path
):
    exchange.export_peft(adapter_run, tmp_path / "peft")
    (tmp_path / "peft" / exchange.OURS).unlink()

    with pytest.raises(ValueError, match="--base: missing"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back")
    base = str(made.folder / "base")
    n = exchange.import_peft(tmp_path / "peft", tmp_path / "back", base=base)

    tree, found = load_run(tmp_path / "back", base=base)
    model = run_model(from_config_dict(found))
    assert n == len(model.adapters) == len({s.site for s in adapter_run.model.adapters})
    assert all(spec.path == spec.site for spec in model.adapters)
    expected, got = (
        paths.flatten(merge_float(one, specs)[0])
        for one, specs in (
            (adapter_run.tree, adapter_run.model.adapters),
            (tree, model.adapters),
        )
    )
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        bound = 1e-6 * abs(value).max()
        np.testing.assert_allclose(got[path], value, rtol=0, atol=bound, err_msg=path)


@pytest.mark.parametrize(
    ("folder", "found"),
    [("nowhere", "no such folder"), (".", "has no adapter_config"), ("f", "is a file")],
)
def test_a_folder_that_is_none_of_peft_is_at_fault_not_the_base(
    tmp_path, folder, found
):
    (tmp_path / "f").touch()

    with pytest.raises(ValueError, match=f"^--from: .*: {found}.*expected a PEFT"):
        exchange.import_peft(tmp_path / folder, tmp_path / "back")


def test_adapters_are_not_put_beside_another_base(made, adapter_run, tmp_path, runs):
    exchange.export_peft(adapter_run, tmp_path / "peft")
    other = runs.make(tmp_path / "other")
    other.base["final_norm"]["scale"][0] += 1
    moved = tmp_path / "moved"
    config = from_config_dict(runs.settings(sft.get_config()))
    merging.write_model(other.base, config, moved, step=0, extra={})

    with pytest.raises(ValueError, match=r"another base.*final_norm/scale.*--base"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back", base=str(moved))
    with pytest.raises(ValueError, match=r"another base.*final_norm/scale.*--base"):
        merging.load_adapter_run(made.path, base=str(moved))
    ours = tmp_path / "peft" / exchange.OURS
    ours.write_text(json.dumps(json.loads(ours.read_text()) | {"format": 9}))
    with pytest.raises(NotImplementedError, match="got format 9"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"format": "1"}', "[" * 100 + "]" * 100],
    ids=["cut", "list", "empty", "text", "deep"],
)
def test_a_file_beside_peft_that_we_did_not_write_is_one_line(
    made, adapter_run, tmp_path, text
):
    exchange.export_peft(adapter_run, tmp_path / "peft")
    (tmp_path / "peft" / exchange.OURS).write_text(text)

    with pytest.raises(ValueError, match=r"remove it and name --base") as refused:
        exchange.import_peft(tmp_path / "peft", tmp_path / "back")

    assert "\n" not in str(refused.value)
