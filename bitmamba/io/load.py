"""Reading checkpoints: verified arrays, placed without a cast; parameters alone."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from bitmamba import paths
from bitmamba.io import digests, meta, steps, store

_GROUP_BYTES = 1 << 28  # of leaves that are read, verified and placed together


class DamagedError(ValueError):
    """What was saved is not what lies on disk; the message is one line."""


def load_params(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All parameters of a checkpoint, trained and frozen, without the model.

    Args:
        path: a work directory or its checkpoints folder (the newest whole step is
            taken; if that is not the newest, one line says which, and why), or a
            step's folder.

    Returns:
        (nested dict of numpy arrays in the saved dtypes, but float32 for bfloat16, the
        step's meta).

    Raises:
        ValueError: nothing there, no whole step, or adapters without their base.
    """
    trainable, frozen, record = load_parts(path)
    if source := record["frozen"].get("source"):
        raise ValueError(
            f"{path}: holds adapters alone, trained on {source}; expected whole "
            "parameters; merge them first with scripts/export_weights.py"
        )
    return paths.merge(frozen, trainable), record


def load_trainable(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint trained, alone; arguments and errors as for `load_params`."""
    trainable, _, record = _newest_whole(path, with_frozen=False)
    return paths.unflatten(trainable), record


def load_parts(
    path: str | Path,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(trained, frozen beside it, meta); as `load_params`, but adapters alone too."""
    trainable, frozen, record = _newest_whole(path, with_frozen=True)
    return paths.unflatten(trainable), paths.unflatten(frozen), record


def _newest_whole(
    path: str | Path, *, with_frozen: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """(trained, frozen or {}, meta) of the newest step that is whole; by path."""
    reasons = []
    for folder in steps.resolve(path):
        try:
            record = read_meta(folder)
            table = record["digests"]["trainable"]
            trainable = _widened(read_whole(folder / "trainable", table))
            frozen = read_frozen(folder.parent, record) if with_frozen else {}
        except DamagedError as damage:
            reasons.append(f"{folder}: {damage}")
            continue
        if reasons:
            told = "; ".join(reasons)
            logging.warning("checkpoint %s; used instead: step %s", told, folder.name)
        return trainable, frozen, record
    raise ValueError(f"checkpoint {reasons[0]}; expected a whole step to load from")


def _widened(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """bfloat16, which only training keeps, as float32: the same values."""
    return {
        path: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x
        for path, x in arrays.items()
    }


def read_meta(folder: Path) -> dict[str, Any]:
    """The verified `meta` item of a step folder.

    Raises:
        DamagedError: it is missing, unreadable or does not match its own digest.
        NotImplementedError: it is of a newer format.
    """
    with _damage_in("meta"):
        if not (folder / "meta").is_dir():
            raise ValueError("missing")
        return meta.verified(store.read_json(folder / "meta"))


def read_whole(folder: Path, table: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The arrays of an item by path, verified by their digests.

    Raises:
        DamagedError: they cannot be read, or differ from what was saved.
    """
    if not table:
        return {}
    with _damage_in(folder.name):
        arrays = store.read_tree(folder, table, table=table)
        if changed := digests.changed_leaves(arrays, table):
            raise ValueError(f"{changed[0]}: digest differs from the one saved")
    return arrays


def read_frozen(directory: Path, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The verified frozen parameters that a step refers to; {} when there are none.

    Raises:
        DamagedError: they are missing or damaged.
    """
    name, table = record["frozen"]["folder"], record["frozen"]["digests"]
    if name is None:
        return {}
    if not (directory / name).is_dir():
        raise DamagedError(
            f"frozen parameters: {directory / name} is missing; expected it beside "
            "the step's folder; copy the whole checkpoints folder"
        )
    return read_whole(directory / name / "params", table)


@contextlib.contextmanager
def _damage_in(item: str) -> Iterator[None]:
    """Whatever reading an item raises means damage, unless it is about this machine."""
    try:
        yield
    except (MemoryError, PermissionError, NotImplementedError):
        raise
    except Exception as error:  # a damaged file shows as almost any error
        raise DamagedError(f"{item}: {one_line(error)}") from None


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


def is_whole(folder: Path, table: Mapping[str, str]) -> bool:
    """Whether these frozen parameters are there; damaged ones are set aside."""
    if not folder.exists():
        return False
    try:
        read_whole(folder / "params", table)
    except DamagedError as damage:
        logging.warning("checkpoint %s: %s; saved again", folder, damage)
        steps.quarantine(folder)
        return False
    return True


def read_placed(folder: Path, table: Mapping[str, str], target: Any) -> Any:
    """`read_whole`, then `place`; of what is large some leaves at a time.

    So no host holds more than one large leaf whole, wherever the others lie.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(target)
    leaves = {digests.path_name(path): leaf for path, leaf in flat}
    placed: dict[str, Any] = {}
    for group in _groups(leaves):
        arrays = read_whole(folder, {path: table[path] for path in group})
        placed |= {path: place_leaf(arrays[path], leaves[path]) for path in group}
    return jax.tree_util.tree_unflatten(structure, [placed[path] for path in leaves])


def _groups(leaves: Mapping[str, Any]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for path, leaf in leaves.items():
        dtype = getattr(leaf, "dtype", np.dtype(float))
        n = math.prod(getattr(leaf, "shape", ())) * dtype.itemsize
        if group and size + n > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(path)
        size += n
    yield group


def check_finite(tree: Any, *, where: str) -> None:
    """Refuse parameters that are not finite.

    Raises:
        ValueError: one line naming the first leaf, and its first row that is not.
    """
    for path, leaf in digests.leaves(tree).items():
        array = np.asarray(leaf)
        if not jax.numpy.issubdtype(array.dtype, np.inexact):
            continue
        bad = ~np.isfinite(array.astype(np.float32, copy=False))
        if bad.any():
            raise ValueError(
                f"{where}: {path}: {int(bad.sum())} of {array.size} values are not "
                f"finite, the first at {tuple(map(int, np.argwhere(bad)[0]))}; "
                "expected finite parameters; use an older step"
            )


def place(arrays: Mapping[str, np.ndarray], target: Any) -> Any:
    """Put arrays into the target's structure, on the devices of its leaves."""
    flat, structure = jax.tree_util.tree_flatten_with_path(target)
    placed = [place_leaf(arrays[digests.path_name(p)], leaf) for p, leaf in flat]
    return jax.tree_util.tree_unflatten(structure, placed)


def place_leaf(array: np.ndarray, target: Any) -> Any:
    """One array where its target lies."""
    if not hasattr(target, "dtype"):
        return array.item()
    if isinstance(target, np.ndarray | np.generic):
        return array
    if spreads(target):
        # Each process makes its own devices' parts.
        return jax.make_array_from_callback(
            array.shape, target.sharding, lambda index: array[index]
        )
    is_loose = isinstance(target, jax.Array) and not target.committed
    sharding = None if is_loose else getattr(target, "sharding", None)
    if digests.is_key(target):
        impl = jax.random.key_impl(target)
        key = jax.random.wrap_key_data(array, impl=impl)
        return key if sharding is None else jax.device_put(key, sharding)
    return jax.device_put(array, sharding)


def spreads(target: Any) -> bool:
    """Whether a target lies on several devices."""
    sharding = getattr(target, "sharding", None)
    return sharding is not None and len(sharding.device_set) > 1


def one_line(error: BaseException) -> str:
    """An error in one line; both ends of a long one, as the reason may come last."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:70]} ... {text[-120:]}"
