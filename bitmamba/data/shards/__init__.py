"""Files of text by suffix: each one's records as numbered rows; ../SHARDS.md."""

import glob
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bitmamba.assets_path import must_exist, resolve
from bitmamba.config import DataConfig
from bitmamba.data.records import Line, read_lines


def _array_record(path: Path, cfg: DataConfig, notes: Counter[str]) -> Iterator[Line]:
    from bitmamba.data.shards import array_record

    return array_record.read(path, records=cfg.records, notes=notes)


def _parquet(path: Path, cfg: DataConfig, notes: Counter[str]) -> Iterator[Line]:
    from bitmamba.data.shards import parquet

    return parquet.read(path, column=cfg.text_column)


def _jsonl(path: Path, cfg: DataConfig, notes: Counter[str]) -> Iterator[Line]:
    return read_lines(path, notes=notes)


Reader = Callable[[Path, DataConfig, Counter[str]], Iterator[Line]]
# Suffix of the name -> how the file is read, and the settings that its rows depend on.
SHARDS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    ".array_record": (_array_record, ("records",)),
    ".arrayrecord": (_array_record, ("records",)),
    ".parquet": (_parquet, ("text_column",)),
    ".jsonl": (_jsonl, ()),
    ".jsonl.gz": (_jsonl, ()),
    ".json": (_jsonl, ()),
}
_ALWAYS_LARGE = (".array_record", ".arrayrecord", ".parquet")


def is_large(name: str) -> bool:
    """Whether a setting names text to be read through a cache, not into memory."""
    return name.lower().endswith(_ALWAYS_LARGE) or _is_pattern(name)


def find(name: str, *, where: str) -> list[Path]:
    """The files that a setting names, in the order of their paths.

    Args:
        name: a path, or a pattern with "*", "?", "[…]" or "**".
        where: the setting, for messages.

    Raises:
        ValueError: there is no such file.
    """
    if resolve(name).is_dir():
        raise ValueError(
            f"{where}: got {name!r} (a folder); expected a file, or a pattern as "
            f"'{name.rstrip('/')}/*.jsonl'"
        )
    if not _is_pattern(name):
        return [must_exist(name, where=where)]
    pattern = str(resolve(name))
    found = sorted(Path(p) for p in glob.glob(pattern, recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        raise ValueError(
            f"{where}: got {name!r}, which no file matches; expected at least one"
            f"{_beside(pattern)}"
        )
    return files


def suffix_of(path: Path, *, where: str) -> str:
    """The entry of `SHARDS` for a file of large text.

    Raises:
        ValueError: no such entry.
    """
    fits = [s for s in SHARDS if path.name.lower().endswith(s)]
    if not fits:
        raise ValueError(
            f"{where}: got {path}; expected a name that ends in {', '.join(SHARDS)}"
        )
    return max(fits, key=len)


def read(path: Path, cfg: DataConfig, *, notes: Counter[str]) -> Iterator[Line]:
    """The rows of a file, by its suffix; any other than those above is JSONL."""
    fits = [s for s in SHARDS if path.name.lower().endswith(s)]
    reader = SHARDS[max(fits, key=len)][0] if fits else _jsonl
    return reader(path, cfg, notes)


def row_settings(suffixes: Sequence[str], cfg: DataConfig) -> dict[str, str]:
    """The settings that rows of these kinds of files depend on."""
    return {key: getattr(cfg, key) for s in suffixes for key in SHARDS[s][1]}


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[") and not resolve(name).is_file()


def _beside(pattern: str) -> str:
    """What lies in the nearest folder of the pattern that exists."""
    folder = Path(pattern).parent
    while any(c in str(folder) for c in "*?[") or not folder.is_dir():
        if folder == folder.parent:
            return ""
        folder = folder.parent
    names = sorted(p.name for p in folder.iterdir())
    return f"; in {folder} lie {', '.join(names[:5]) or 'no files'}"
