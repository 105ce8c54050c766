"""JSON files of others: of a bounded size and depth, as values or as one sentence."""

import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 64


def read_json(file: Path, *, max_bytes: int) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: one line naming the file: too large, not UTF-8, not JSON, a key
            twice in one object, or nested too deeply.
    """
    n_bytes = file.stat().st_size
    if n_bytes > max_bytes:
        raise ValueError(f"{file}: {n_bytes:,} bytes; expected at most {max_bytes:,}")
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{file}: not JSON ({error}); expected a whole JSON file"
        ) from None


def parse_json(raw: bytes) -> Any:
    """The value in JSON bytes.

    Raises:
        ValueError: as for `read_json`, without the file's name.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(str(error)[:120]) from None
    _check_depth(value)
    return value


_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return made


def _check_depth(value: Any) -> None:
    """Without recursion: how deep Python itself may go differs by version."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [v for v in level if isinstance(v, dict | list)]
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
