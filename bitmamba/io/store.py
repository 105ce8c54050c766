"""Items of a step: written by Orbax, read back array by array with TensorStore.

The files are Orbax's own (OCDBT, zarr) and any Orbax reads them. We read with the
library under it, because Orbax's reader leaves tasks behind when a file is damaged,
whose tracebacks appear at any later time. Everything is read as numpy arrays in the
saved dtype, whatever devices wrote it; the caller verifies the bytes.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from bitmamba.io import digests, quiet
from bitmamba.io.json_file import read_json as _read_json
from bitmamba.io.meta import MAX_BYTES
from bitmamba.io.packed_index import check_index
from bitmamba.io.tensors import check_fits

_TREE_ITEMS = ("trainable", "opt_state", "params")
_READ_BYTES = 1 << 28  # of arrays whose reads are in flight together


class Leaf(NamedTuple):
    """One array of an item, known without reading it.

    spec: `dtype[shape]`; PRNG keys appear as their key data. n_bytes: unpacked.
    """

    spec: str
    n_bytes: int


def make_writer() -> ocp.AsyncCheckpointer:
    """An asynchronous writer of steps; holds threads until closed."""
    quiet.silence_orbax()
    trees = {
        item: ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
        for item in _TREE_ITEMS
    }
    handler = ocp.CompositeCheckpointHandler(meta=ocp.JsonCheckpointHandler(), **trees)
    return ocp.AsyncCheckpointer(handler)


def close_writer(writer: ocp.AsyncCheckpointer) -> None:
    """Release its threads; what it still has to say has been told before."""
    with contextlib.suppress(Exception):
        writer.close()


def start_write(writer: ocp.AsyncCheckpointer, folder: Path, **items: Any) -> None:
    """Copy the items and begin writing them; the folder appears when complete.

    Args:
        writer: from `make_writer`; errors surface in its `wait_until_finished`.
        folder: must not exist.
        **items: `meta` is a JSON-able dict; "trainable", "opt_state" or "params" a
            pytree of arrays; one without leaves is left out, as Orbax refuses it.
    """
    args = {
        name: ocp.args.JsonSave(item) if name == "meta" else ocp.args.PyTreeSave(item)
        for name, item in items.items()
        if name == "meta" or jax.tree.leaves(item)
    }
    writer.save(folder, args=ocp.args.Composite(**args))


def read_json(folder: Path) -> Any:
    """The JSON item in a folder."""
    return _read_json(folder / "metadata", max_bytes=MAX_BYTES)


def read_leaves(folder: Path, paths: Iterable[str]) -> dict[str, Leaf]:
    """Shapes and dtypes of an item's arrays, from their metadata alone."""
    return {path: _leaf(array) for path, array in _open(folder, paths).items()}


def read_tree(
    folder: Path, paths: Iterable[str], *, table: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """An item's arrays as numpy; PRNG keys as their key data.

    Args:
        folder: of the item.
        paths: of the arrays.
        table: their digests; an array of another shape or dtype is then not read.

    Raises:
        ValueError: an array is not as the table has it, or all do not fit the memory.
    """
    arrays: dict[str, np.ndarray] = {}
    reading: dict[str, ts.Future] = {}
    n_bytes = 0
    opened = _open(folder, paths)
    for path, array in opened.items():
        _check_metadata(path, array, (table or {}).get(path))
    check_fits(str(folder), sum(_leaf(array).n_bytes for array in opened.values()))
    for path, array in opened.items():
        reading[path] = array.read()
        n_bytes += _leaf(array).n_bytes
        if n_bytes > _READ_BYTES:
            arrays |= {p: future.result() for p, future in reading.items()}
            reading, n_bytes = {}, 0
    return arrays | {path: future.result() for path, future in reading.items()}


def _open(folder: Path, paths: Iterable[str]) -> dict[str, ts.TensorStore]:
    """Open arrays of an item; the cache is new, so that the disk is read anew.

    Raises:
        ValueError: its index would take too much memory.
    """
    check_index(folder)
    context = ts.Context()
    base = {"driver": "file", "path": f"{folder}/"}
    opening = {}
    for path in paths:
        store = {"driver": "ocdbt", "base": base, "path": path.replace("/", ".") + "/"}
        spec = {"driver": "zarr", "kvstore": store}
        opening[path] = ts.open(spec, open=True, read=True, context=context)
    return {path: future.result() for path, future in opening.items()}


def _check_metadata(path: str, array: ts.TensorStore, digest: str | None) -> None:
    """Shape, dtype, packing and chunks, before memory is taken for them."""
    found = _leaf(array).spec
    if digest and not digests.is_key_spec(digest) and found != digests.spec_of(digest):
        raise ValueError(
            f"{path}: got {found}; expected {digests.spec_of(digest)} as saved"
        )
    compressor = (array.codec.to_json() or {}).get("compressor") or {}
    if compressor.get("id", "zstd") != "zstd":
        # Blosc unpacks whole, up to 2 GiB, before it looks at the shape.
        raise ValueError(f"{path}: packed by {compressor['id']}; expected zstd")
    chunk = array.chunk_layout.read_chunk.shape or ()
    if any(c > max(n, 1) for c, n in zip(chunk, array.shape, strict=False)):
        raise ValueError(f"{path}: got chunks {chunk} of a shape {array.shape}")


def _leaf(array: ts.TensorStore) -> Leaf:
    dtype, shape = np.dtype(array.dtype.numpy_dtype), array.shape
    spec = digests.spec(jax.ShapeDtypeStruct(shape, dtype))
    return Leaf(spec, math.prod(shape) * dtype.itemsize)
