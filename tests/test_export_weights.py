"""What a LoRA run learned leaves it: merged, as PEFT, and the base back to the bit."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bitmamba import paths
from bitmamba.config_read import from_config_dict, to_json
from bitmamba.io import digests
from bitmamba.io.checkpoint import Checkpointer, load_params
from bitmamba.io.runs import load_run
from bitmamba.lora.adapters import adapter_shapes
from bitmamba.lora.merge import merge_float
from bitmamba.models import build_model, param_shapes
from bitmamba.quant.ternary import ternarise
from bitmamba.train import exchange, merging
from bitmamba.train.build import run_model
from bitmamba.train.restore import base_params
from configs import lora, sft

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("in_proj.x", "in_proj.dt", "out_proj", "mlp", "embed")


def settings(config, **model):
    """A small model, and little of the bundled data."""
    small = {"layers": "M-", "d_model": 32, "vocab_size": 4096} | model
    config.model.update(small)
    config.model.mamba2.update({"headdim": 16, "d_state": 8})
    config.model.mlp.d_ff = 48
    config.data.sft = ("assets:data/sft_scored.jsonl",)
    config.data.replay, config.data.replay_share = (), 0.0
    config.data.window = 64
    config.train.batch_size = 2
    config.checkpoint.init_from = None
    return config


def random_tree(shapes, size, seed):
    rng = np.random.default_rng(seed)
    flat = {}
    for path, leaf in paths.flatten(shapes).items():
        noise = size * rng.standard_normal(leaf.shape)
        if path.endswith("kernel"):
            noise = noise / np.sqrt(leaf.shape[0])
        flat[path] = np.float32(1 + noise if path.endswith(("scale", "D")) else noise)
    return paths.unflatten(flat)


def make_runs(folder, *, size=0.5, model=None, **changes):
    """A base of random weights and a LoRA run on it, as training leaves them."""
    model = model or {}
    config = from_config_dict(settings(sft.get_config(), **model))
    base = random_tree(param_shapes(build_model(config.model)), 1.0, seed=0)
    merging.write_model(base, config, folder / "base", step=0, extra={})
    typed = settings(lora.get_config(), **model)
    typed.lora.place = PLACES
    typed.lora.update(changes)
    typed.checkpoint.init_from = str(folder / "base")
    config = from_config_dict(typed)
    offsets = {"layer_0/mixer/state_offset": (4, 16, 8)} if changes else {}
    adapters = random_tree(
        adapter_shapes(run_model(config).adapters, offsets), size, seed=1
    )
    checkpointer = Checkpointer(
        folder / "lora" / "checkpoints", keep=1, fingerprints={}, config=to_json(config)
    )
    checkpointer.save(
        3,
        trainable=adapters,
        opt_state={},
        frozen_digests=digests.tree_digests(base),
        frozen_source=str(folder / "base"),
        extra={},
    )
    checkpointer.close()
    return SimpleNamespace(
        folder=folder, base=base, path=str(folder / "lora"), config=config
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Base and run of a ternary model."""
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def run(made):
    return merging.load_adapter_run(made.path)


def assert_same_bits(first, second):
    assert digests.tree_digests(first) == digests.tree_digests(second)


def script(name, *flags):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_float_merge_of_a_ternary_model_is_dense_codes_times_scale_and_adapters(run):
    merged = merging.as_float(run)

    assert merged.config.model == dataclasses.replace(run.config.model, linear="dense")
    assert merged.config.train.mode == "full"
    flat, after = paths.flatten(run.tree), paths.flatten(merged.params)
    codes, scale = ternarise(flat["layer_0/mixer/in_proj/kernel"])
    expected = np.float64(codes) * np.float64(scale)
    for spec in run.model.adapters:
        if spec.site == "layer_0/mixer/in_proj":
            a, b = (np.float64(flat[f"{spec.path}/{leaf}"]) for leaf in "ab")
            columns = slice(spec.start, spec.start + spec.shape[1])
            expected[:, columns] += spec.scale * a @ b
    got = after["layer_0/mixer/in_proj/kernel"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * abs(expected).max())
    codes, scale = ternarise(flat["lm_head/kernel"])
    head = np.float32(codes) * np.float32(scale)
    np.testing.assert_array_equal(after["lm_head/kernel"], head)
    assert {row.site for row in merged.rows} == {s.site for s in run.model.adapters}


def test_losses_tell_the_base_the_run_and_the_merge_apart(tmp_path):
    """A dense run loses nothing in a float merge, on data of its own configuration."""
    made = make_runs(tmp_path, model={"linear": "dense", "dtype": "float32"})
    run = merging.load_adapter_run(made.path)

    found = merging.losses(run, {"merged": merging.as_float(run)}, max_windows=2)

    assert list(found) == ["base", "adapters", "merged"]
    for kind in ("eval/loss", "retention/loss"):
        base, adapters, merged = (found[name][kind] for name in found)
        assert merged == pytest.approx(adapters, rel=1e-5)
        assert abs(base - adapters) > 1e-3
    with pytest.raises(ValueError, match="expected ternary layers"):
        merging.as_ternary(run)


def test_ternary_merge_by_command_and_the_base_back_bit_for_bit(made, tmp_path):
    out, back = tmp_path / "ternary", tmp_path / "back"

    code, text, errors = script(
        "export_weights",
        f"--checkpoint={made.path}",
        f"--to={out}",
        "--as=ternary",
        "--windows=2",
    )
    undone = script(
        "export_weights", f"--checkpoint={out}", f"--to={back}", "--as=base"
    )

    assert code == 0, errors
    lines = text.splitlines()
    assert any(line.startswith("layer_0/mixer/out_proj") for line in lines)
    assert any("codes changed (" in line and "lost: " in line for line in lines)
    assert [line.split()[0] for line in lines[-4:-1]] == ["base", "adapters", "ternary"]
    params, config = load_run(out)
    assert from_config_dict(config).model == made.config.model
    before, after = paths.flatten(made.base), paths.flatten(params)
    assert before.keys() == after.keys()
    changed = [p for p in before if before[p].tobytes() != after[p].tobytes()]
    assert "embed/embedding" in changed
    assert all(p == "embed/embedding" or p.endswith("_proj/kernel") for p in changed)
    assert undone[0] == 0, undone[2]
    assert_same_bits(load_params(back)[0], made.base)


def test_a_merge_can_be_trained_on_and_undone(made, run, tmp_path):
    merged = merging.as_float(run)
    merging.save_merged(run, merged, tmp_path / "merged")

    typed = settings(sft.get_config(), linear="dense")
    typed.checkpoint.init_from = str(tmp_path / "merged")
    config = from_config_dict(typed)
    parts = SimpleNamespace(base_shapes=param_shapes(build_model(config.model)))

    assert_same_bits(base_params(config, parts), merged.params)
    undone, plain = merging.unmerge(str(tmp_path / "merged"))
    assert_same_bits(undone, made.base)
    assert plain.model == made.config.model
    merging.save_merged(run, merged, tmp_path / "second")
    with pytest.raises(ValueError, match=r"embed/embedding.*--base"):
        merging.unmerge(str(tmp_path / "merged"), base=str(tmp_path / "second"))
    with pytest.raises(ValueError, match="no merge made"):
        merging.unmerge(str(made.folder / "base"))


def test_peft_folder_gives_back_the_run(made, run, tmp_path):
    """B088: exported, read back, and equal to the trained model, not to the base."""
    written = exchange.export_peft(run, tmp_path / "peft")
    assert any("the base is ternary" in note for note in written.notes)

    n = exchange.import_peft(tmp_path / "peft", tmp_path / "back")

    tree, found = load_run(tmp_path / "back")
    assert n == len(run.model.adapters)
    assert_same_bits(tree, run.tree)
    config = from_config_dict(found)
    assert run_model(config).adapters == run.model.adapters
    assert dataclasses.replace(config, workdir="") == dataclasses.replace(
        made.config, workdir=""
    )


def test_a_foreign_peft_folder_stands_beside_the_base_that_is_named(
    made, run, tmp_path
):
    exchange.export_peft(run, tmp_path / "peft")
    (tmp_path / "peft" / exchange.OURS).unlink()

    with pytest.raises(ValueError, match="--base: missing"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back")
    base = str(made.folder / "base")
    n = exchange.import_peft(tmp_path / "peft", tmp_path / "back", base=base)

    tree, found = load_run(tmp_path / "back")
    model = run_model(from_config_dict(found))
    assert n == len(model.adapters) == len({s.site for s in run.model.adapters})
    assert all(spec.path == spec.site for spec in model.adapters)
    expected, got = (
        paths.flatten(merge_float(one, specs)[0])
        for one, specs in ((run.tree, run.model.adapters), (tree, model.adapters))
    )
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        bound = 1e-6 * abs(value).max()
        np.testing.assert_allclose(got[path], value, rtol=0, atol=bound, err_msg=path)


def test_adapters_are_not_put_beside_another_base(made, run, tmp_path):
    exchange.export_peft(run, tmp_path / "peft")
    other = make_runs(tmp_path / "other")
    other.base["final_norm"]["scale"][0] += 1
    moved = tmp_path / "moved"
    config = from_config_dict(settings(sft.get_config()))
    merging.write_model(other.base, config, moved, step=0, extra={})

    with pytest.raises(ValueError, match=r"another base.*final_norm/scale.*--base"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back", base=str(moved))
    with pytest.raises(ValueError, match=r"another base.*final_norm/scale.*--base"):
        merging.load_adapter_run(made.path, base=str(moved))
    ours = tmp_path / "peft" / exchange.OURS
    ours.write_text(json.dumps(json.loads(ours.read_text()) | {"format": 9}))
    with pytest.raises(NotImplementedError, match="got format 9"):
        exchange.import_peft(tmp_path / "peft", tmp_path / "back")


def test_what_cannot_be_merged_is_refused(made, run, tmp_path):
    offset = make_runs(tmp_path / "offset", state_offset=True)
    shifted = merging.load_adapter_run(offset.path)
    inner = dataclasses.replace(run.config.model, norm_placement="linear")
    public = run._replace(config=dataclasses.replace(run.config, model=inner))

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
        merging.save_merged(run, merging.as_ternary(run), made.folder / "base")


def test_a_merge_that_changes_no_code_is_refused(tmp_path):
    """B090, on a run."""
    run = merging.load_adapter_run(make_runs(tmp_path, size=1e-3).path)

    with pytest.raises(ValueError, match=r"0 of .* codes change.*--as=peft"):
        merging.as_ternary(run)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("export_weights", ["--to=x", "--as=peft"], "--checkpoint: missing"),
        ("export_weights", ["--checkpoint=x", "--to=y", "--as=gguf"], "got 'gguf'"),
        ("import_adapter", ["--from=nowhere"], "--to: missing"),
    ],
)
def test_mistakes_are_one_line(name, flags, message):
    code, _, errors = script(name, *flags)

    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
