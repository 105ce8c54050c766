"""Who may import whom: the arrows of the house plan, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Package (longest prefix wins) -> what it may import of ours, beside itself.
ALLOWED = {
    "bitmamba.types": set(),
    "bitmamba.paths": set(),
    "bitmamba.assets_path": set(),
    "bitmamba.config": {"config_model", "config_guard", "config_mesh"},
    "bitmamba.config_guard": set(),
    "bitmamba.config_mesh": set(),
    "bitmamba.config_model": set(),
    "bitmamba.config_checks": {"config", "config_mesh"},
    "bitmamba.config_read": {"config", "config_checks"},
    "bitmamba.command_line": set(),
    "bitmamba.models": {"quant", "paths", "config", "types"},
    "bitmamba.lora": {"paths", "config", "types"},
    "bitmamba.optim": {"paths", "config", "types"},
    "bitmamba.losses": {"types"},
    "bitmamba.data": {"config", "types", "assets_path"},
    "bitmamba.io": {"paths", "quant", "config", "types", "assets_path"},
    "bitmamba.quant": {"types"},
    "bitmamba.report": {"config", "types"},
    "bitmamba.assets": set(),
    # The pure parts of training know types only; the others compose.
    "bitmamba.train.step": {"train.state", "train.metrics", "train.spike", "types"},
    "bitmamba.train.spike": {"types"},
    "bitmamba.train.guard": {"config", "types"},
    "bitmamba.train.metrics": {"types"},
    "bitmamba.train.state": {"train.spike", "types"},
    "bitmamba.train.evaluate": {"train.step", "train.metrics", "types"},
    "bitmamba.train": None,
}
MAY_USE_KERNELS = {"bitmamba.models", "bitmamba.quant"}
ONLY_IN = {
    "orbax": ("bitmamba/io/",),
    "grain": ("bitmamba/data/pipeline.py",),
    "array_record": ("bitmamba/data/shards/", "scripts/"),
    "pyarrow": ("bitmamba/data/shards/",),
    "ml_collections": ("configs/", "bitmamba/config.py", "train.py", "scripts/"),
    "jax.experimental.pallas": ("pallas_kernels/",),
    "torch": ("tests/optim/fixtures/", "scripts/bench_"),
    "pickle": (),
}


def imported(path: Path) -> set[str]:
    """Full dotted names that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def python_files(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def owner(module: str) -> str:
    """The longest entry of ALLOWED that holds the module."""
    fits = [k for k in ALLOWED if module == k or module.startswith(k + ".")]
    assert fits, f"{module} has no line in ALLOWED; add one"
    return max(fits, key=len)


BITMAMBA = [p for p in python_files("bitmamba") if module_of(p) != "bitmamba"]


@pytest.mark.parametrize("path", BITMAMBA, ids=module_of)
def test_bitmamba_imports_follow_the_plan(path):
    module = module_of(path)
    home = owner(module)
    allowed = ALLOWED[home]

    for name in imported(path):
        if name.split(".")[0] == "pallas_kernels":
            assert home in MAY_USE_KERNELS, f"{module} imports {name}"
        if not name.startswith("bitmamba.") or allowed is None:
            continue
        inside = name.removeprefix("bitmamba.")
        own = home.removeprefix("bitmamba.")
        fine = any(inside == a or inside.startswith(a + ".") for a in {*allowed, own})
        assert fine, f"{module} imports {name}"


def test_kernels_import_jax_only():
    for path in python_files("pallas_kernels"):
        for name in imported(path):
            root = name.split(".")[0]
            known = {"jax", "pallas_kernels", "numpy"}
            assert root in known or root in STANDARD, f"{path.name} imports {name}"


STANDARD = {
    "collections",
    "contextlib",
    "contextvars",
    "dataclasses",
    "functools",
    "importlib",
    "itertools",
    "logging",
    "math",
    "re",
    "typing",
    "types",
    "__future__",
}


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_where_it_belongs_only(library):
    files = [ROOT / "train.py"]
    for folder in ("bitmamba", "pallas_kernels", "configs", "scripts"):
        files += python_files(folder)
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        for name in imported(path):
            if name == library or name.startswith(library + "."):
                assert place.startswith(ONLY_IN[library]), f"{place} imports {name}"


RUNS_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_nothing_that_is_read_can_run_code():
    """No pickle by any name, and no evaluation of text."""
    files = [ROOT / "train.py"]
    for folder in ("bitmamba", "pallas_kernels", "configs", "scripts"):
        files += python_files(folder)
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        assert not {n.split(".")[0] for n in imported(path)} & UNPICKLES, place
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                value = getattr(node.value, "value", None)
                assert value is False, f"{place}:{node.value.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in RUNS_CODE, f"{place}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                assert name not in ("torch.load", "yaml.load", "os.system"), place


def test_reading_a_config_and_data_loads_no_jax():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "import bitmamba.train.start\n"
        "slow = {'jax', 'flax', 'orbax', 'grain', 'optax'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {slow}' if slow else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


def test_top_level_is_closed():
    known = {
        "pyproject.toml",
        "README.md",
        "bitmamba",
        "pallas_kernels",
        "configs",
        "train.py",
        "tests",
        "scripts",
    }
    listed = {
        p.name
        for p in ROOT.iterdir()
        if not p.name.startswith(".") and p.name not in ("runs", "__pycache__")
    }

    assert {n for n in listed if not n.endswith(".egg-info")} <= known
