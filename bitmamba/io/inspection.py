"""What a checkpoint holds, told from metadata alone; and how two differ."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bitmamba.io import digests, load, steps, store


class Contents(NamedTuple):
    """A step without its arrays.

    folder: of the step. meta: its JSON item. n_bytes: on disk, without frozen.
    items: leaves by path of "trainable", "opt_state" and "frozen".
    """

    folder: Path
    meta: dict[str, Any]
    n_bytes: int
    items: dict[str, dict[str, store.Leaf]]


class Difference(NamedTuple):
    """A leaf that is not the same in both; max_abs is None if not comparable."""

    path: str
    first: str
    second: str
    max_abs: float | None


def contents(path: str | Path) -> Contents:
    """Items, paths, shapes and dtypes of the newest step; reads no weights.

    Args:
        path: a work directory, its checkpoints folder or a step's folder.

    Raises:
        ValueError: nothing there, or the step is damaged.
    """
    folder = steps.resolve(path)[0]
    try:
        record = load.read_meta(folder)
        found = {
            item: _leaves(where, table)
            for item, (where, table) in _tables(folder, record).items()
        }
    except load.DamagedError as damage:
        raise ValueError(f"checkpoint {folder}: {damage}") from None
    return Contents(folder, record, steps.n_bytes(folder), found)


def differences(first: str | Path, second: str | Path) -> list[Difference]:
    """Leaves of parameters and optimiser state that differ, in order of their paths.

    The bytes on disk are digested, so damage shows as a difference. Parameters are
    compared by path, whether they were trained or frozen.

    Args:
        first, second: as in `contents`; the newest step of each.

    Raises:
        ValueError: nothing there, or a step that cannot be read.
    """
    sides = [_Side(path) for path in (first, second)]
    mine, other = (side.digests for side in sides)
    unlike = [p for p in sorted(mine | other) if mine.get(p) != other.get(p)]
    arrays = [side.arrays(unlike) for side in sides]
    return [
        Difference(
            path,
            _spec(mine.get(path)),
            _spec(other.get(path)),
            _max_abs(arrays[0].get(path), arrays[1].get(path)),
        )
        for path in unlike
    ]


class _Side:
    """One step of a comparison: digests of what lies on disk, by compared path."""

    def __init__(self, path: str | Path):
        self._folder = steps.resolve(path)[0]
        self.digests: dict[str, str] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        try:
            record = load.read_meta(self._folder)
        except load.DamagedError as damage:
            raise ValueError(f"checkpoint {self._folder}: {damage}") from None
        for item, (where, table) in _tables(self._folder, record).items():
            prefix = "opt_state/" if item == "opt_state" else ""
            for name, array in self._read(where, table).items():
                is_key = digests.is_key_spec(table[name])
                as_spec = (
                    digests.spec_of(table[name]) if is_key else digests.spec(array)
                )
                self.digests[prefix + name] = digests.data_digest(array, as_spec)
                self._where[prefix + name] = (where, name)

    def _read(self, where: Path, table: dict[str, str]) -> dict[str, np.ndarray]:
        if not table:
            return {}
        try:
            return store.read_tree(where, table)
        except Exception as error:  # a damaged file shows as almost any error
            reason = f"{where.name}: {load.one_line(error)}"
            raise ValueError(f"checkpoint {self._folder}: {reason}") from None

    def arrays(self, paths: list[str]) -> dict[str, np.ndarray]:
        """The arrays at some compared paths."""
        found = {}
        for path in paths:
            if path in self._where:
                where, name = self._where[path]
                found[path] = store.read_tree(where, [name])[name]
        return found


def _tables(
    folder: Path, record: dict[str, Any]
) -> dict[str, tuple[Path, dict[str, str]]]:
    """Where each item lies, and the digests saved for it."""
    found = {item: (folder / item, table) for item, table in record["digests"].items()}
    frozen = record["frozen"]
    if frozen["folder"]:
        where = folder.parent / frozen["folder"] / "params"
        found["frozen"] = (where, frozen["digests"])
    return found


def _leaves(where: Path, table: dict[str, str]) -> dict[str, store.Leaf]:
    """Leaves of an item, PRNG keys by their own dtype."""
    if not table:
        return {}
    try:
        found = store.read_leaves(where, table)
    except Exception as error:  # a damaged file shows as almost any error
        raise load.DamagedError(f"{where.name}: {load.one_line(error)}") from None
    return {
        path: leaf._replace(spec=digests.spec_of(table[path]))
        if digests.is_key_spec(table[path])
        else leaf
        for path, leaf in found.items()
    }


def _spec(digest: str | None) -> str:
    return "absent" if digest is None else digests.spec_of(digest)


def _max_abs(first: np.ndarray | None, second: np.ndarray | None) -> float | None:
    if first is None or second is None or first.shape != second.shape:
        return None
    if not (_is_number(first) and _is_number(second)) or first.size == 0:
        return None
    gap = np.abs(first.astype(np.float64) - second.astype(np.float64))
    return float(gap.max())


def _is_number(array: np.ndarray) -> bool:
    return jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == np.bool_
