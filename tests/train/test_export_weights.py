"""scripts/export_weights.py and scripts/import_adapter.py as their user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitmamba import paths
from bitmamba.config_read import from_config_dict
from bitmamba.io import digests
from bitmamba.io.checkpoint import load_params
from bitmamba.io.runs import load_run

ROOT = Path(__file__).resolve().parents[2]


def assert_same_bits(first, second):
    assert digests.tree_digests(first) == digests.tree_digests(second)


def script(name, *flags, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *flags],
        cwd=cwd,
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.once
def test_ternary_merge_by_command_and_the_base_back_bit_for_bit(made, tmp_path):
    out, back = tmp_path / "ternary", tmp_path / "back"

    code, text, errors = script(
        "export_weights",
        f"--checkpoint={made.path}",
        f"--to={out}",
        "--as=ternary",
        "--windows=2",
    )
    # The merge names its base by path, which is followed from where both lie.
    undoing = ("export_weights", f"--checkpoint={out}", f"--to={back}", "--as=base")
    refused = script(*undoing)
    undone = script(*undoing, cwd=made.folder)

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
    assert refused[0] == 2
    assert "name it with --base" in refused[2]
    assert undone[0] == 0, undone[2]
    assert_same_bits(load_params(back)[0], made.base)


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
