import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from bitmamba.io import checkpoint, inspection, store

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "inspect_checkpoint.py"
FROZEN = {"body": {"w": jnp.ones((2, 2))}}


@pytest.fixture(scope="module")
def script(script):
    return script("inspect_checkpoint")


@pytest.fixture
def saved(toy, open_checkpointer, tmp_path):
    """Steps 1 and 2, and step 2 saved once more in another run's folder."""
    first = open_checkpointer()
    other = open_checkpointer(directory=tmp_path / "other" / "checkpoints")
    table = first.save_frozen(FROZEN)
    toy.save(first, 1, frozen_digests=table)
    toy.save(first, 2, frozen_digests=table)
    whole = {**toy.make_trainable(2), **FROZEN}  # nothing frozen in this run
    toy.save(other, 2, trainable=whole)
    assert first.wait() is other.wait() is None
    return tmp_path


def console_of(script):
    return script.make_console(is_terminal=False)


@pytest.mark.parametrize("path", [".", "checkpoints", "checkpoints/2"])
def test_table_without_reading_weights(saved, script, path, capsys, monkeypatch):
    monkeypatch.setattr(store, "read_tree", lambda *_: pytest.fail("read weights"))

    script.show(str(saved / path), console_of(script))

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trainable", "embed/embedding", "bfloat16", "(5,", "4)", "40"] in rows
    assert ["opt_state", "0/1/0/count", "int32", "()", "4"] in rows
    assert ["opt_state", "3", "key<fry>", "()", "8"] in rows
    assert ["frozen", "body/w", "float32", "(2,", "2)", "16"] in rows
    assert rows[1][:2] == ["step", "2,"]
    assert ["config.model:", "d_model=4"] in rows
    assert ["trainable:", "3", "arrays,", "56", "bytes"] in rows


def test_no_row_is_cut_or_wrapped_off_the_terminal(
    toy, open_checkpointer, script, tmp_path, capsys
):
    name = "x" * 300
    checkpointer = open_checkpointer()
    toy.save(checkpointer, 1, trainable={name: jnp.ones(1)})
    checkpointer.wait()

    script.show(str(tmp_path), console_of(script))

    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if name in line]
    assert row == ["trainable", name, "float32", "(1)", "4"]


def test_identical_whether_trained_or_frozen(saved, script, capsys):
    script.show_differences(str(saved), str(saved / "other"), console_of(script))

    assert capsys.readouterr().out == "identical\n"


def test_every_leaf_that_differs_is_listed(saved, script, capsys, toy):
    first, second = saved / "checkpoints/1", saved / "checkpoints/2"

    script.show_differences(str(first), str(second), console_of(script))

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(lines) - 2} leaves differ"
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert rows["scale"] == ["float32[]", "float32[]", "1"]
    gap = jnp.abs(
        toy.make_trainable(1)["layer_0"]["A_log"]
        - toy.make_trainable(2)["layer_0"]["A_log"]
    ).max()
    assert float(rows["layer_0/A_log"][2]) == pytest.approx(float(gap), rel=1e-5)
    assert "body/w" not in rows  # the frozen parameters are the same
    assert "opt_state/0/1/0/count" not in rows
    assert {"opt_state/3", "opt_state/5", "embed/embedding"} <= set(rows)


def test_absent_leaves_and_other_shapes_differ(toy, open_checkpointer, tmp_path):
    trees = {"a": {"x": jnp.ones(2), "y": jnp.ones(1)}, "b": {"x": jnp.ones(3)}}
    for name, tree in trees.items():
        checkpointer = open_checkpointer(directory=tmp_path / name)
        toy.save(checkpointer, 1, trainable=tree)
        checkpointer.wait()

    found = inspection.differences(tmp_path / "a", tmp_path / "b")

    assert found == [
        ("x", "float32[2]", "float32[3]", None),
        ("y", "float32[1]", "absent", None),
    ]


def test_damage_is_not_called_identical(toy, saved, open_checkpointer, monkeypatch):
    """The bytes on disk are compared, not what was once written about them."""
    wrong = {**toy.make_trainable(2), **FROZEN, "scale": jnp.float32(2.5)}
    checkpointer = open_checkpointer(directory=saved / "wrong" / "checkpoints")
    recorded = inspection.contents(saved / "other").meta["digests"]
    monkeypatch.setattr(
        checkpoint.digests,
        "tree_digests",
        lambda tree: recorded["trainable" if isinstance(tree, dict) else "opt_state"],
    )
    toy.save(checkpointer, 2, trainable=wrong)
    assert checkpointer.wait() is None

    found = inspection.differences(saved / "wrong", saved / "other")

    assert found == [("scale", "float32[]", "float32[]", 0.5)]


def test_damaged_meta_is_a_mistake(saved):
    (saved / "checkpoints/2/meta/metadata").write_bytes(b"")

    with pytest.raises(ValueError, match=r"checkpoint .*/2: meta: "):
        inspection.contents(saved)


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120
    )


def test_command_line_diff(saved):
    done = run(saved / "checkpoints/1", "--diff", saved)

    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].endswith(" leaves differ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        ([__file__], f"{__file__}: is a file; expected a work directory"),
        ([], "got 0 paths; expected one PATH"),
        (["--dif=x", "a"], "'dif'"),
    ],
    ids=["missing", "file", "none", "typo"],
)
def test_command_line_mistakes(arguments, message):
    done = run(*arguments)

    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_terminal_width_is_kept(saved, script, capsys):
    console = Console(width=60, highlight=False, markup=False)

    script.show(str(saved), console)

    table = capsys.readouterr().out.split("item", 1)[1]
    assert max(map(len, table.splitlines())) <= 60
