"""The thin layer over Orbax: items of a step written and read as host arrays.

Everything is read as numpy arrays in the saved dtype, whatever devices wrote it;
the caller verifies the bytes and only then places them.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from bitmamba.io import digests

TREE_ITEMS = ("trainable", "opt_state", "params")


class Leaf(NamedTuple):
    """One array of an item, known without reading it.

    spec: `dtype[shape]`; PRNG keys appear as their key data. n_bytes: unpacked.
    """

    spec: str
    n_bytes: int


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace("\\", "/")


def silence() -> None:
    """Drop Orbax's own log lines and tracebacks; errors still reach us."""
    logger = logging.getLogger("absl")
    if _not_from_orbax not in logger.filters:
        logger.addFilter(_not_from_orbax)


def make_writer() -> ocp.AsyncCheckpointer:
    """An asynchronous writer of steps; holds threads until closed."""
    silence()
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def start_write(writer: ocp.AsyncCheckpointer, folder: Path, **items: Any) -> None:
    """Copy the items and begin writing them; the folder appears when complete.

    Args:
        writer: from `make_writer`; errors surface in its `wait_until_finished`.
        folder: must not exist.
        **items: `meta` is a JSON-able dict, every other item a pytree of arrays; a
            tree without leaves is left out, as Orbax refuses it.
    """
    args = {
        name: ocp.args.JsonSave(item) if name == "meta" else ocp.args.StandardSave(item)
        for name, item in items.items()
        if name == "meta" or jax.tree.leaves(item)
    }
    writer.save(folder, args=ocp.args.Composite(**args))


def read_json(folder: Path) -> dict[str, Any]:
    """The JSON item in a folder."""
    silence()
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(folder, args=ocp.args.JsonRestore())


def read_leaves(folder: Path) -> dict[str, Leaf]:
    """The leaves of a tree item by path, from its metadata alone."""
    silence()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = digests.leaves(_metadata_tree(reader, folder))
    return {path: _leaf(metadata) for path, metadata in found.items()}


def read_tree(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a tree item by path, as numpy; PRNG keys as their key data."""
    silence()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = _metadata_tree(reader, folder)
        if not jax.tree_util.tree_leaves(tree):
            return {}
        as_numpy = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        args = ocp.args.PyTreeRestore(restore_args=as_numpy)
        restored = reader.restore(folder, args=args)
    return {p: np.asarray(leaf) for p, leaf in digests.leaves(restored).items()}


def _metadata_tree(reader: ocp.Checkpointer, folder: Path) -> Any:
    metadata = reader.metadata(folder).item_metadata
    if metadata is None:
        raise ValueError(f"{folder}: no array metadata")
    return metadata.tree


def _leaf(metadata: Any) -> Leaf:
    dtype, shape = np.dtype(metadata.dtype), getattr(metadata, "shape", ())
    n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return Leaf(f"{dtype}[{','.join(map(str, shape))}]", n_bytes)
