"""Bytes to rows: a JSONL reader that accounts for every line.

Lines end at b"\\n" and nowhere else (U+2028 is text). A byte-order mark, CRLF, blank
lines and a missing last newline are accepted. A line that cannot be a row is refused
with its number and reason; the file goes on.
"""

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bitmamba.data.example import Refused

MAX_LINE_BYTES = 16 * 2**20
_BOM = b"\xef\xbb\xbf"
# json has joined the pairs already; what is left is alone.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Line(NamedTuple):
    """One line that is not blank: a row, or why it is none."""

    number: int
    row: dict[str, Any] | None
    refused: Refused | None


def read_lines(path: Path, *, notes: Counter[str]) -> Iterator[Line]:
    """Read a JSONL file (.gz too) line by line.

    Args:
        path: the file.
        notes: counts what was accepted but is worth telling; added to.

    Raises:
        ValueError: the file as a whole is something else (UTF-16, damaged gzip).
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            yield from _lines(file, path, notes)
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: damaged gzip ({error})") from None


def _lines(file: Any, path: Path, notes: Counter[str]) -> Iterator[Line]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            raw = _without_mark(raw, path, notes)
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            size = len(raw) + _skip_line(file, raw)
            limit = MAX_LINE_BYTES // 2**20
            detail = f"{size:,} bytes; the limit is {limit} MiB"
            yield Line(number, None, Refused("line too long", detail))
        elif not raw.strip():
            notes["blank lines"] += 1
        else:
            yield _parse(number, raw, notes)


def _without_mark(raw: bytes, path: Path, notes: Counter[str]) -> bytes:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{path}: UTF-16; expected UTF-8; convert the file")
    if raw.startswith(_BOM):
        notes["byte-order mark"] += 1
        return raw[len(_BOM) :]
    return raw


def _skip_line(file: Any, raw: bytes) -> int:
    """Read on to the end of the line without keeping it."""
    skipped = 0
    while not raw.endswith(b"\n"):
        raw = file.readline(2**20)
        if not raw:
            break
        skipped += len(raw)
    return skipped


def _parse(number: int, raw: bytes, notes: Counter[str]) -> Line:
    try:
        row = _row(raw)
        # An escaped half of a UTF-16 pair is the one way to text that no encoder takes.
        if b"\\u" in raw:
            row, repaired = _repair(row)
            if repaired:
                notes["rows with lone surrogates, replaced by U+FFFD"] += 1
        return Line(number, row, None)
    except Refused as refused:
        return Line(number, None, refused)


def _row(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        raise Refused("not UTF-8", where) from None
    try:
        row = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise Refused("nested too deeply") from None
    except json.JSONDecodeError as error:
        detail = f"{error.msg} at column {error.colno}"
        if text.strip() in ("[", "]") or text.rstrip().endswith(("},", "}]")):
            detail += "; looks like a JSON array, expected one object a line"
        raise Refused("not JSON", detail) from None
    except ValueError as error:  # an integer of thousands of digits
        raise Refused("not JSON", str(error)[:80]) from None
    if not isinstance(row, dict):
        kind = "array" if isinstance(row, list) else type(row).__name__
        raise Refused("not a JSON object", f"{kind}; expected one object a line")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise Refused("duplicate key", repr(counts.most_common(1)[0][0]))
    return made


def _constant(name: str) -> float:
    raise Refused("not JSON", f"{name} is not a JSON number")


def _repair(value: Any) -> tuple[Any, bool]:
    """Lone surrogates to U+FFFD in every string of a row."""
    if isinstance(value, str):
        if value.isascii():
            return value, False
        fixed = _SURROGATE.sub("\ufffd", value)
        return fixed, fixed != value
    if isinstance(value, list):
        parts = [_repair(v) for v in value]
        return [v for v, _ in parts], any(r for _, r in parts)
    if isinstance(value, dict):
        parts = {_repair(k)[0]: _repair(v) for k, v in value.items()}
        made = {k: v for k, (v, _) in parts.items()}
        return made, made != value
    return value, False


def text_field(row: dict[str, Any], key: str, *, empty: bool = False) -> str:
    """A string of the row; NUL, and unless asked for emptiness, are refused."""
    return checked_text(row.get(key), repr(key), empty=empty)


def checked_text(value: Any, name: str, *, empty: bool = False) -> str:
    """`value` if it is usable text; `name` says what it is."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise Refused("not text", f"{name} is {kind}; expected a string")
    if "\0" in value:
        raise Refused("NUL character", f"in {name}")
    if not empty and not value.strip():
        raise Refused("empty text", f"{name} is empty")
    return value


def number_field(row: dict[str, Any], key: str) -> float:
    """A finite number of the row."""
    value = row.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # json reads 1e999 as infinity.
    if not number or not math.isfinite(value):
        raise Refused("not a number", f"{key!r} is {value!r}"[:80])
    return float(value)
