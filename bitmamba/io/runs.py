"""A run's whole model from its checkpoint, wherever its frozen parameters lie."""

import json
from pathlib import Path
from typing import Any

from bitmamba import paths
from bitmamba.assets_path import must_exist
from bitmamba.io import digests
from bitmamba.io.base import BASE, load_base
from bitmamba.io.load import load_params, load_parts
from bitmamba.io.sources import followed
from bitmamba.types import Params


def load_run(path: str | Path, *, base: str | None = None) -> tuple[Params, dict]:
    """Parameters and adapters of a run, and the configuration they were trained with.

    Args:
        path: a work directory, a step's folder, or "assets:base".
        base: where the frozen parameters lie, if not where the run says, or if that
            is neither beside the run nor in the working directory.

    Returns:
        (tree of float32 arrays, base and adapters together; the configuration as JSON).

    Raises:
        ValueError: nothing there; damaged; the base is not the run's.
    """
    if str(path) == BASE:
        file = must_exist(f"{BASE}/config.json", where="--checkpoint")
        return load_base(), json.loads(file.read_text())
    own, frozen, meta = load_parts(path)
    source = meta["frozen"].get("source")
    if source is None:
        return paths.merge(own, frozen), meta["config"]
    source = base or followed(source, beside=path, flag="--base")
    frozen = _base_of(path, source, meta["frozen"]["digests"])
    return paths.merge(own, frozen), meta["config"]


def _base_of(path: Any, source: str, wanted: dict[str, str]) -> Params:
    flat = paths.flatten(load_base() if source == BASE else load_params(source)[0])
    frozen = paths.unflatten({p: v for p, v in flat.items() if p in wanted})
    digests.check_same(
        digests.tree_digests(frozen),
        wanted,
        where=f"{path}: its adapters belong to another base than {source}",
        advice="name the right one with --base",
    )
    return frozen
