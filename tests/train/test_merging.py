"""Runs merged into models of their own, measured, and taken apart again."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config_read import from_config_dict
from bitmamba.io import digests
from bitmamba.models import build_model, param_shapes
from bitmamba.quant.ternary import ternarise
from bitmamba.train import exchange, merging
from bitmamba.train.restore import base_params
from configs import sft

pytestmark = pytest.mark.newest


def assert_same_bits(first, second):
    assert digests.tree_digests(first) == digests.tree_digests(second)


def test_float_merge_of_a_ternary_model_is_dense_and_exact(adapter_run):
    merged = merging.as_float(adapter_run)

    assert merged.config.model == dataclasses.replace(
        adapter_run.config.model, linear="dense"
    )
    assert merged.config.train.mode == "full"
    flat, after = paths.flatten(adapter_run.tree), paths.flatten(merged.params)
    codes, scale = ternarise(flat["layer_0/mixer/in_proj/kernel"])
    expected = np.float64(codes) * np.float64(scale)
    for spec in adapter_run.model.adapters:
        if spec.site == "layer_0/mixer/in_proj":
            a, b = (np.float64(flat[f"{spec.path}/{leaf}"]) for leaf in "ab")
            columns = slice(spec.start, spec.start + spec.shape[1])
            expected[:, columns] += spec.scale * a @ b
    got = after["layer_0/mixer/in_proj/kernel"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * abs(expected).max())
    codes, scale = ternarise(flat["lm_head/kernel"])
    head = np.float32(codes) * np.float32(scale)
    np.testing.assert_array_equal(after["lm_head/kernel"], head)
    assert {row.site for row in merged.rows} == {
        s.site for s in adapter_run.model.adapters
    }


def test_losses_tell_the_base_the_run_and_the_merge_apart(tmp_path, runs):
    """A dense run loses nothing in a float merge, on data of its own configuration."""
    made = runs.make(tmp_path, model={"linear": "dense", "dtype": "float32"})
    run = merging.load_adapter_run(made.path)

    found = merging.losses(run, {"merged": merging.as_float(run)}, max_windows=2)

    assert list(found) == ["base", "adapters", "merged"]
    for kind in ("eval/loss", "retention/loss"):
        base, adapters, merged = (found[name][kind] for name in found)
        assert merged == pytest.approx(adapters, rel=1e-5)
        assert abs(base - adapters) > 1e-3
    data = dataclasses.replace(run.config.data, heldout_share=0.0)
    bare = run._replace(config=dataclasses.replace(run.config, data=data))
    text_alone = merging.losses(bare, {}, max_windows=2)["base"]
    assert "eval/loss" not in text_alone
    assert text_alone["retention/loss"] == found["base"]["retention/loss"]
    with pytest.raises(ValueError, match="expected ternary layers"):
        merging.as_ternary(run)


def test_a_merge_can_be_trained_on_and_undone(made, adapter_run, tmp_path, runs):
    merged = merging.as_float(adapter_run)
    merging.save_merged(adapter_run, merged, tmp_path / "merged")

    typed = runs.settings(sft.get_config(), linear="dense")
    typed.checkpoint.init_from = str(tmp_path / "merged")
    config = from_config_dict(typed)
    parts = SimpleNamespace(base_shapes=param_shapes(build_model(config.model)))

    assert_same_bits(base_params(config, parts), merged.params)
    with pytest.raises(ValueError, match=r"nor beside it.*--base"):
        merging.unmerge(str(tmp_path / "merged"))
    base = str(made.folder / "base")
    undone, plain = merging.unmerge(str(tmp_path / "merged"), base=base)
    assert_same_bits(undone, made.base)
    assert plain.model == made.config.model
    merging.save_merged(adapter_run, merged, tmp_path / "second")
    with pytest.raises(ValueError, match=r"embed/embedding.*--base"):
        merging.unmerge(str(tmp_path / "merged"), base=str(tmp_path / "second"))
    with pytest.raises(ValueError, match="no merge made"):
        merging.unmerge(str(made.folder / "base"))


def test_what_trained_directly_is_merged_as_it_is_and_undone(runs, tmp_path):
    made = runs.make(tmp_path, train=(".*/A_log",))
    run = merging.load_adapter_run(made.path)
    leaf = "layer_0/mixer/A_log"

    merged = merging.as_float(run)
    merging.save_merged(run, merged, tmp_path / "merged")

    before = paths.flatten(made.base)[leaf]
    after = paths.flatten(merged.params)[leaf]
    np.testing.assert_array_equal(after, before + np.float32(0.25))
    assert_same_bits(merging.unmerge(str(tmp_path / "merged"))[0], made.base)
    with pytest.raises(ValueError, match=f"{leaf}.*--as=merged"):
        exchange.export_peft(run, tmp_path / "peft")


def test_what_cannot_be_merged_is_refused(made, adapter_run, tmp_path, runs):
    offset = runs.make(tmp_path / "offset", offset=True)
    shifted = merging.load_adapter_run(offset.path)
    inner = dataclasses.replace(adapter_run.config.model, norm_placement="linear")
    public = adapter_run._replace(
        config=dataclasses.replace(adapter_run.config, model=inner)
    )

    for merge in (merging.as_float, merging.as_ternary):
        with pytest.raises(ValueError, match=r"state_offset.*generate\.py"):
            merge(shifted)
    with pytest.raises(ValueError, match=r"state_offset.*--as=merged"):
        exchange.export_peft(shifted, tmp_path / "peft")
    with pytest.raises(ValueError, match=r"norm_placement.*--as=ternary"):
        merging.as_float(public)
    with pytest.raises(ValueError, match=r"train\.mode=full.*no adapters"):
        merging.load_adapter_run(str(made.folder / "base"))
    with pytest.raises(ValueError, match="not empty"):
        merging.save_merged(
            adapter_run, merging.as_ternary(adapter_run), made.folder / "base"
        )


def test_a_merge_that_changes_no_code_is_refused(tmp_path, runs):
    """B090, on a run."""
    run = merging.load_adapter_run(runs.make(tmp_path, size=1e-3).path)

    with pytest.raises(ValueError, match=r"0 of .* codes change.*--as=peft"):
        merging.as_ternary(run)
