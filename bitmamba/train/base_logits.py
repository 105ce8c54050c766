"""The base's largest logits of every window of a plan: computed once, kept on disk.

Instead of a copy of the first values of what trains, and a forward pass of it in each
step. `<workdir>/base_logits` holds ids.npy (windows, L, K) int32, logits.npy float32,
and made.json, written last, which says of what base and plan they are.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.format import open_memmap
from rich.console import Console

from bitmamba import config_read, paths
from bitmamba.config import Config
from bitmamba.data import DataBundle
from bitmamba.io.digests import tree_digests
from bitmamba.lora.adapters import is_adapter_leaf
from bitmamba.report import units
from bitmamba.report.progress import progress_bar
from bitmamba.train import build, restore
from bitmamba.train.objective import make_base_top_k
from bitmamba.types import BatchWithBase, Params

VERSION = 1


def batches_with_base(
    config: Config,
    data: DataBundle,
    parts: build.Parts,
    begin: restore.Started,
    *,
    console: Console,
) -> Callable[[int], Iterator[BatchWithBase]]:
    """What `data.batches` serves, with the base's logits; they are computed if needed.

    Raises:
        ValueError: they do not fit on the disk.
    """
    folder = Path(config.workdir) / "base_logits"
    own = _own_first_values(config, parts, begin)
    wanted = _identity(config, data, {**begin.digests, **tree_digests(own)})
    if _made(folder) == wanted:
        console.print(f"base logits: as computed before, in {folder}")
    else:
        own = jax.tree.map(jnp.asarray, own)  # in a resumed run until all is computed
        make = jax.jit(make_base_top_k(parts.model, config.loss.top_k))
        _compute(
            lambda batch: make(own, begin.held.weights, batch),
            folder,
            wanted,
            data,
            console=console,
        )
    return lambda start: _serve(folder, data, start)


def _own_first_values(
    config: Config, parts: build.Parts, begin: restore.Started
) -> Params:
    """Base parameters that train, as they were before step 1."""
    if int(begin.state.step) > 0:
        own = build.split_trainable(config, restore.base_params(config, parts))[0]
        return build.as_masters(config, own)
    return paths.split(begin.state.trainable, lambda path: not is_adapter_leaf(path))[0]


def _identity(
    config: Config, data: DataBundle, digests: dict[str, str]
) -> dict[str, Any]:
    """All that decides the logits, and their shape, as plain JSON data."""
    windows = data.steps * data.batch_size * data.accumulation
    return {
        "version": VERSION,
        "shape": [windows, data.window, config.loss.top_k],
        "plan": data.plan_digest,
        "model": config_read.to_json(config)["model"],
        "base": dict(sorted(digests.items())),
    }


def _made(folder: Path) -> dict[str, Any] | None:
    path = folder / "made.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _compute(
    make: Callable,
    folder: Path,
    identity: dict[str, Any],
    data: DataBundle,
    *,
    console: Console,
) -> None:
    """Fill the files; made.json is there only while they are whole."""
    before = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made.json").unlink(missing_ok=True)
    files = _new_files(folder, tuple(identity["shape"]))
    at = 0
    with progress_bar(console, total=data.steps, start=0) as show:
        for number, batch in enumerate(data.batches(0), start=1):
            for micro in range(data.accumulation):
                found = make(jax.tree.map(lambda field, m=micro: field[m], batch))
                for file, rows in zip(files, jax.device_get(found), strict=True):
                    file[at : at + data.batch_size] = rows
                at += data.batch_size
            show(number, "base logits")
    for file in files:
        file.flush()
    text = json.dumps(identity, indent=1)
    (folder / "made.part").write_text(text, encoding="utf-8")
    (folder / "made.part").replace(folder / "made.json")
    console.print(
        f"base logits: {identity['shape'][-1]} for each token, "
        f"{units.size(sum(file.nbytes for file in files))} in {folder}, computed in "
        f"{units.duration(time.perf_counter() - before)}"
    )


def _new_files(folder: Path, shape: tuple[int, ...]) -> tuple[np.memmap, np.memmap]:
    """Empty ids and logits; a full disk is told here, where it can be."""
    for name in ("ids.npy", "logits.npy"):
        (folder / name).unlink(missing_ok=True)
    needed = int(np.prod(shape)) * 8
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"config.loss.base_logits: cached logits take {units.size(needed)} in "
            f"{folder}; expected at most {units.size(free)}, what is free there; lower "
            "config.loss.top_k, or set base_logits to copy"
        )
    return (
        open_memmap(folder / "ids.npy", mode="w+", dtype=np.int32, shape=shape),
        open_memmap(folder / "logits.npy", mode="w+", dtype=np.float32, shape=shape),
    )


def _serve(folder: Path, data: DataBundle, start: int) -> Iterator[BatchWithBase]:
    """Batches from step `start` on; windows lie in the order of the plan."""
    files = [np.load(folder / n, mmap_mode="r") for n in ("ids.npy", "logits.npy")]
    n = data.accumulation * data.batch_size
    for step, batch in enumerate(data.batches(start), start=start):
        rows = slice(step * n, (step + 1) * n)
        shape = (*batch.tokens.shape, files[0].shape[-1])
        yield BatchWithBase(*batch, *(np.array(f[rows]).reshape(shape) for f in files))
