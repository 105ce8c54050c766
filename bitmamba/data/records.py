"""Bytes to rows: a JSONL reader that accounts for every line.

Lines end at b"\\n" and nowhere else (U+2028 is text). A byte-order mark, CRLF, blank
lines and a missing last newline are accepted. A line that cannot be a row is refused
with its number and reason; the file goes on. HOSTILE.md has the limits.
"""

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bitmamba.data.example import Refused

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 64
# Of a packed file; JSON packs 20-fold at best, gzip at most 1032-fold.
MAX_RATIO = 200
MIN_UNPACKED_BYTES = 2**28
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
_BOM = b"\xef\xbb\xbf"
# json has joined the pairs already; what is left is alone.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Line(NamedTuple):
    """One line that is not blank: a row, or why it is none; n_bytes: its length."""

    number: int
    row: dict[str, Any] | None
    refused: Refused | None
    n_bytes: int = 0


class _Unpacked:
    """A gzip file that may not unpack to far more than its size."""

    def __init__(self, file: Any, path: Path):
        self._file, self._path = file, path
        self._left = max(MIN_UNPACKED_BYTES, MAX_RATIO * path.stat().st_size)

    def readline(self, size: int) -> bytes:
        raw = self._file.readline(size)
        self._left -= len(raw)
        if self._left < 0:
            raise ValueError(
                f"{self._path}: gzip: unpacks to more than {MAX_RATIO} times its size; "
                "expected text; unpack it yourself if it is meant"
            )
        return raw


def read_lines(path: Path, *, notes: Counter[str]) -> Iterator[Line]:
    """Read a JSONL file (gzip too) line by line.

    Args:
        path: the file.
        notes: counts what was accepted but is worth telling; added to.

    Raises:
        ValueError: the file as a whole is something else (UTF-16, damaged gzip, a
            gzip that unpacks to far more than its size).
    """
    with path.open("rb", buffering=2**20) as file:
        packed = file.read(2) == b"\x1f\x8b" or path.suffix == ".gz"
        file.seek(0)
        if not packed:
            yield from _lines(file, path, notes)
            return
        try:
            with gzip.open(file) as unpacked:
                yield from _lines(_Unpacked(unpacked, path), path, notes)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
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
            yield Line(number, None, Refused("line too long", detail), len(raw))
        elif not raw.strip():
            notes["blank lines"] += 1
        else:
            yield parse_line(number, raw, notes)


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


def parse_line(number: int, raw: bytes, notes: Counter[str]) -> Line:
    """A row of JSON, or why it is none."""
    try:
        row = _row(raw)
        # An escaped half of a UTF-16 pair is the one way to text that no encoder takes.
        if b"\\u" in raw:
            row, repaired = _repair(row)
            if repaired:
                notes["rows with lone surrogates, replaced by U+FFFD"] += 1
        return Line(number, row, None, len(raw))
    except Refused as refused:
        return Line(number, None, refused, len(raw))


def text_line(number: int, raw: bytes) -> Line:
    """A text as the row {"text": …}, or why it is none."""
    try:
        return Line(number, {"text": raw.decode("utf-8")}, None, len(raw))
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1}"
        return Line(number, None, Refused("not UTF-8", where), len(raw))


def too_long(number: int, n_bytes: int) -> Line | None:
    """The refusal of a record that is larger than a line may be."""
    if n_bytes <= MAX_LINE_BYTES:
        return None
    detail = f"{n_bytes:,} bytes; the limit is {MAX_LINE_BYTES // 2**20} MiB"
    return Line(number, None, Refused("record too long", detail), n_bytes)


def _row(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        raise Refused("not UTF-8", where) from None
    try:
        row = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise Refused("nested too deeply", _TOO_DEEP) from None
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
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(row)
    return row


_TOO_DEEP = f"more than {MAX_DEPTH} levels"


def _check_depth(row: dict[str, Any]) -> None:
    """Without recursion: how deep Python itself may go differs by version."""
    level: list[Any] = [row]
    for _ in range(MAX_DEPTH):
        parts = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for part in parts for v in part if isinstance(v, dict | list)]
        if not level:
            return
    raise Refused("nested too deeply", _TOO_DEEP)


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
        made = _object([(_repair(k)[0], _repair(v)[0]) for k, v in value.items()])
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
    if not is_number(value):
        raise Refused("not a number", f"{key!r} is {value!r}"[:80])
    return float(value)


def is_number(value: Any) -> bool:
    """Whether a value of a row is a number that float64 holds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)  # json reads 1e999 as infinity
    except OverflowError:  # an integer of hundreds of digits
        return False


def is_weight(value: float) -> bool:
    """Whether a number can weigh a loss: 0, or far from the ends of float32."""
    return value == 0 or MIN_WEIGHT <= value <= MAX_WEIGHT
