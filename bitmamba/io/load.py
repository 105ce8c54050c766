"""Reading checkpoints: verified arrays, placed without a cast; parameters alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from bitmamba import paths
from bitmamba.io import digests, meta, steps, store


def load_params(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All parameters of a checkpoint, trained and frozen, without the model.

    Args:
        path: a work directory or its checkpoints folder (the newest whole step is
            taken, with one line for each damaged one), or a step's folder.

    Returns:
        (nested dict of numpy arrays in the saved dtypes, the step's meta).

    Raises:
        ValueError: nothing there, or no whole step.
    """
    folders, reasons = steps.resolve(path), []
    for folder in folders:
        try:
            return _load_step(folder)
        except NotImplementedError:
            raise
        except Exception as error:  # damage shows as almost any error
            reasons.append(f"{folder}: {one_line(error)}")
            if len(folders) > 1:
                logging.warning("checkpoint %s; trying the next older", reasons[-1])
    raise ValueError(f"checkpoint {reasons[0]}; expected a whole step to load from")


def _load_step(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    record = meta.read_meta(folder)
    arrays, reason = read_whole(folder / "trainable", record["digests"]["trainable"])
    if reason is not None:
        raise ValueError(f"trainable: {reason}")
    frozen = read_frozen(folder.parent, record)
    return paths.unflatten({**frozen, **arrays}), record


def read_whole(
    folder: Path, table: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], str | None]:
    """Read an item and verify it: (arrays by path, what is wrong or None)."""
    if not table:
        return {}, None
    try:
        arrays = store.read_tree(folder)
    except Exception as error:  # damage shows as almost any error
        return {}, one_line(error)
    wrong = digests.damage(arrays, table)
    return arrays, wrong[0] if wrong else None


def read_frozen(directory: Path, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The verified frozen parameters that a step refers to; {} when there are none.

    Raises:
        ValueError: they are missing or damaged.
    """
    name, table = record["frozen"]["folder"], record["frozen"]["digests"]
    if name is None:
        return {}
    folder = directory / name
    if not folder.is_dir():
        raise ValueError(
            f"frozen parameters: {folder} is missing; expected it beside the step "
            "folder; copy the whole checkpoints folder"
        )
    arrays, reason = read_whole(folder / "params", table)
    if reason is not None:
        raise ValueError(f"frozen parameters: {folder}: {reason}")
    return arrays


def check_target(target: Any, table: Mapping[str, str], where: str) -> None:
    """Refuse a target tree whose paths, shapes or dtypes are not the saved ones.

    Raises:
        ValueError: one line naming the first leaf that differs.
    """
    wanted = {path: digests.spec(leaf) for path, leaf in digests.leaves(target).items()}
    saved = {path: digests.spec_of(digest) for path, digest in table.items()}
    for path in sorted(wanted | saved):
        if wanted.get(path) != saved.get(path):
            raise ValueError(
                f"{where}/{path}: got {wanted.get(path, 'no such leaf')}; expected "
                f"{saved.get(path, 'no such leaf')} as saved (nothing is cast); resume "
                "with the model and optimiser that were saved"
            )


def place(arrays: Mapping[str, np.ndarray], target: Any) -> Any:
    """Put arrays into the target's structure, on the devices of its leaves."""
    flat, structure = jax.tree_util.tree_flatten_with_path(target)
    placed = [_place_leaf(arrays[digests.path_name(p)], leaf) for p, leaf in flat]
    return jax.tree_util.tree_unflatten(structure, placed)


def _place_leaf(array: np.ndarray, target: Any) -> Any:
    if not hasattr(target, "dtype"):
        return array.item()
    if isinstance(target, np.ndarray | np.generic):
        return array
    is_loose = isinstance(target, jax.Array) and not target.committed
    sharding = None if is_loose else getattr(target, "sharding", None)
    if digests.is_key(target):
        impl = jax.random.key_impl(target)
        key = jax.random.wrap_key_data(array, impl=impl)
        return key if sharding is None else jax.device_put(key, sharding)
    return jax.device_put(array, sharding)


def one_line(error: BaseException) -> str:
    """The first line of an error, short enough for a message."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 200 else f"{text[:197]}..."
