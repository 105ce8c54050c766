"""Runs that train adapters: what a checkpoint holds, resume to the bit, the base."""

import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from bitmamba.io.load import load_params, load_trainable
from bitmamba.io.runs import load_run
from bitmamba.models import build_model, init_params, variables
from bitmamba.paths import flatten
from bitmamba.train import loop
from bitmamba.train.build import run_model
from bitmamba.train.merging import write_model
from bitmamba.train.start import read_config, read_data
from configs import lora, sft

STEPS = 4


def settings(workdir, get_config, **changes):
    """The bundled data, a model of two tiny layers."""
    config = get_config("tiny")
    config.workdir = str(workdir)
    small = {
        "model.layers": "M-",
        "model.d_model": 32,
        "model.mamba2.headdim": 16,
        "model.mamba2.d_state": 8,
        "model.mlp.d_ff": 32,
        "data.window": 64,
        "train.batch_size": 2,
        "train.steps": STEPS,
        "eval.max_windows": 2,
        "eval.every": STEPS,
        "eval.prompts": (),
        "checkpoint.every": 2,
        "checkpoint.init_from": None,
    }
    config.update_from_flattened_dict(small | changes)
    return read_config(config)


def run(config, data=None):
    return loop.run(config, data or read_data(config))()


def make_base(folder, seed=0, **changes):
    """A checkpoint of fresh parameters."""
    config = settings(folder, sft.get_config, **changes)
    params = init_params(build_model(config.model), jax.random.key(seed))
    write_model(params, config, folder, step=1, extra={})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What adapters are trained on."""
    return make_base(tmp_path_factory.mktemp("base") / "run")


def adapters(workdir, base, **changes):
    changes = {
        "checkpoint.init_from": str(base),
        "lora.rank": 2,
        "lora.dropout": 0.1,
        "lora.train": (".*/A_log",),
        "loss.tmkl": 0.1,
    } | changes
    return settings(workdir, lora.get_config, **changes)


@pytest.fixture(scope="module")
def unbroken(base):
    # Beside its base, which `load_run` then follows by its name.
    workdir = base.with_name("lora")
    assert run(adapters(workdir, base)) == 0
    return workdir


def test_a_checkpoint_holds_what_trained_alone_and_names_its_base(unbroken, base):
    own, meta = load_trainable(unbroken)

    found = flatten(own)
    assert sorted({path.rpartition("/")[2] for path in found}) == ["A_log", "a", "b"]
    assert "layer_0/mixer/in_proj/a" in found
    folders = [p.name for p in (unbroken / "checkpoints").iterdir()]
    assert sorted(folders) == ["2", "4"]
    assert meta["frozen"]["folder"] is None
    assert meta["frozen"]["source"] == str(base)
    size = sum(f.stat().st_size for f in unbroken.rglob("checkpoints/4/**/*"))
    whole = sum(leaf.nbytes for leaf in flatten(load_params(base)[0]).values())
    assert size < whole / 2


@pytest.mark.newest
def test_a_run_is_the_base_and_its_adapters_together(unbroken, base):
    tree, config = load_run(unbroken)

    before = flatten(load_params(base)[0])
    for path, leaf in flatten(tree).items():
        if path in before and not path.endswith("A_log"):
            assert np.array_equal(leaf, before[path]), path
    assert np.any(flatten(tree)["layer_0/mixer/in_proj/b"])
    tokens = np.arange(8, dtype=np.int32)[None]
    model = run_model(read_config(config))
    logits = jax.jit(lambda t: model.apply(variables(model, t), tokens))(tree)
    plain = model.clone(adapters=())
    base_logits = plain.apply(variables(plain, load_params(base)[0]), tokens)
    assert np.abs(logits - base_logits).max() > 1e-4


@pytest.mark.newest
def test_a_stop_and_the_rest_are_bit_equal_to_all_at_once(unbroken, base, tmp_path):
    config = adapters(tmp_path / "run", base)
    data = read_data(config)
    batches = data.batches

    def stopped_in_step_three(start):
        for number, batch in enumerate(batches(start), start + 1):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    object.__setattr__(data, "batches", stopped_in_step_three)
    assert run(config, data) == 143

    assert run(config) == 0

    (_, meta), (_, expected) = (
        load_trainable(tmp_path / "run"),
        load_trainable(unbroken),
    )
    assert meta["step"] == expected["step"] == STEPS
    assert meta["digests"] == expected["digests"]


@pytest.mark.newest
def test_adapters_are_refused_by_another_base(unbroken, base, tmp_path):
    moved, changed = base.with_name("moved"), tmp_path / "base"
    shutil.copytree(unbroken, moved)
    make_base(changed, seed=1)
    kept = base.with_name("kept")
    base.rename(kept)
    try:
        changed.rename(base)
        with pytest.raises(
            ValueError, match=r"is not the base that this run began"
        ) as resumed:
            run(adapters(moved, base, **{"train.steps": STEPS}))
        with pytest.raises(ValueError, match=r"belong to another base than") as loaded:
            load_run(moved)
    finally:
        shutil.rmtree(base)
        kept.rename(base)

    assert str(base) in str(resumed.value)
    assert "--base" in str(loaded.value)
    tree, _ = load_run(moved, base=str(base))
    assert "layer_0/mixer/in_proj/kernel" in flatten(tree)


def test_adapters_alone_are_no_start_of_another_run(unbroken, tmp_path):
    config = settings(
        tmp_path / "run", sft.get_config, **{"checkpoint.init_from": str(unbroken)}
    )

    with pytest.raises(ValueError, match="holds adapters alone"):
        run(config)


@pytest.mark.newest
def test_the_base_is_kept_beside_adapters_that_began_from_a_seed(tmp_path):
    changes = {"train.steps": 1, "checkpoint.init_from": None, "loss.tmkl": 0.0}
    changes |= {"model.layers": "-", "lora.train": ()}
    assert run(adapters(tmp_path / "run", None, **changes)) == 0

    tree, _ = load_run(tmp_path / "run")

    assert "embed/embedding" in flatten(tree)
    assert any(p.name.startswith("frozen-") for p in Path(tmp_path).rglob("frozen-*"))


@pytest.mark.once
def test_full_training_that_compares_with_its_start_is_refused_another(tmp_path):
    """TMKL would pull towards a model that this run never was."""
    layers = {"model.layers": "-"}
    start, workdir = make_base(tmp_path / "start", **layers), tmp_path / "run"
    loss = {"loss.tmkl": 0.1, "loss.base_logits": "cached", "loss.top_k": 4}
    changes = layers | loss | {"checkpoint.init_from": str(start), "train.steps": 1}
    assert run(settings(workdir, sft.get_config, **changes)) == 0
    shutil.rmtree(start)
    make_base(start, seed=1, **layers)

    with pytest.raises(ValueError, match="is not the base that this run began from"):
        run(settings(workdir, sft.get_config, **changes))


@pytest.mark.newest
def test_coverage_is_shown_first_and_an_adapter_cut_off_from_the_loss_is_named(
    tmp_path, capsys
):
    # Step sizes that are clamped to one value have no gradient.
    cut_off = {
        "checkpoint.init_from": None,
        "lora.place": ("in_proj.dt",),
        "lora.train": (),
        "loss.tmkl": 0.0,
        "model.mamba2.dt_limit": (0.01, 0.01),
    }

    with pytest.raises(ValueError, match=r"layer_0/mixer/in_proj/dt/b: its gradient"):
        run(adapters(tmp_path / "run", None, **cut_off))

    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "mamba2 in_proj dt 1 of 1 2 72" in lines
    assert "mlp up_proj - 0 of 1 - 0" in lines
    assert lines.index("in all 1 of 7 72") < min(
        i for i, line in enumerate(lines) if line.startswith("step 1/")
    )
