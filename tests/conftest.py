"""Tests run on the CPU, and spend their time on computing, not on compiling.

Nearly all of the time is compilation. So the programs of the tests' own processes are
compiled with little effort, and each once for all workers: they share a cache, which is
made for this run of the tests and goes with it. Processes that the tests start see the
cache but not the low effort: they compile as a user's do. A test whose point depends on
the machine code, as equality to the bit does, compiles with `users_level`.
"""

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
LONG = ("once", "slow")  # pyproject.toml says what they are
LITTLE_EFFORT = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if not IS_WORKER:  # workers inherit it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="bitmamba-xla-")


def _start_jax_with(flags):
    """JAX reads XLA_FLAGS once, at its start; what is started later does not see it."""
    given = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{flags} {given or ''}"
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.devices()
    del os.environ["XLA_FLAGS"]
    if given is not None:
        os.environ["XLA_FLAGS"] = given


_start_jax_with(LITTLE_EFFORT)


def pytest_collection_modifyitems(config, items):
    """What takes long runs when asked for: pytest -m once, pytest -m slow."""
    if config.option.markexpr:
        return
    long = {item for item in items for mark in item.iter_markers() if mark.name in LONG}
    if long:
        config.hook.pytest_deselected(items=sorted(long, key=items.index))
        items[:] = [item for item in items if item not in long]


def pytest_unconfigure():
    if not IS_WORKER:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session")
def users_level():
    """compiler_options that make what a user's process makes."""
    return {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }


@pytest.fixture(scope="module")
def script():
    """script(name) is the module scripts/<name>.py.

    It and its flags leave with the file of tests: two scripts may call a flag the same,
    and which files of tests share a process is not for the tests to know.
    """
    from absl import flags

    folder = Path(__file__).parents[1] / "scripts"
    modules, names = set(sys.modules), set(flags.FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield importlib.import_module
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == folder:
            del sys.modules[name]
    for name in set(flags.FLAGS) - names:
        delattr(flags.FLAGS, name)


@pytest.fixture(scope="module")
def programs_compiled_once():
    """Runs of a file share their programs, small ones too; users' cache only large."""
    import jax

    from bitmamba.train import build

    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "use_compilation_cache", lambda: None)
        jax.config.update(name, 0.0)
        yield
    jax.config.update(name, before)
