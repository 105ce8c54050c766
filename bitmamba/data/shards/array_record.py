"""ArrayRecord files: one UTF-8 text a record, or one row of JSON as in JSONL.

The library verifies a hash of every group of records (chunk) that it reads.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader

from bitmamba.data.example import Refused
from bitmamba.data.formats import parse_row
from bitmamba.data.records import Line, parse_line, text_line, too_long

# Records are read one after another, so reading ahead would only hold more of them.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
MAX_GROUP_BYTES = 2**28
# Of Riegeli's files, which these are: blocks of 64 KiB, each with a header; between
# those the chunks lie end to end, each after a header of five 64-bit numbers. A chunk
# has at least as many bytes as records, block headers counted.
# (github.com/google/riegeli, doc/riegeli_records_file_format.md)
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 2**16, 24, 40
_JSON_SEEN = 16  # records looked at, to tell rows from text


def read(path: Path, *, records: str, notes: Counter[str]) -> Iterator[Line]:
    """The records of a file in their order, numbered from 1, as rows.

    Args:
        path: the file.
        records: "text": each is a text, which is row["text"]; "json": each is a row.
        notes: counts what is worth telling; added to.

    Raises:
        ValueError: not an ArrayRecord file, a damaged one, one whose groups are too
            large for memory, or rows of JSON where text is expected.
    """
    check_groups(path)
    reader = ArrayRecordReader(str(path), _OPTIONS)
    if not reader.ok():
        raise ValueError(f"{path}: not an ArrayRecord file, or one that is cut short")
    n = reader.num_records()
    only_json = records == "text" and n > 0
    for number in range(1, n + 1):
        raw = _next(reader, path, number)
        if long := too_long(number, len(raw)):
            yield long
        elif records == "json":
            yield parse_line(number, raw, notes)
        else:
            only_json = only_json and _is_row(raw)
            if only_json and number == min(n, _JSON_SEEN):
                raise ValueError(
                    f"{path}: its records are rows of JSON; expected plain text by "
                    "config.data.records=text; set config.data.records=json"
                )
            yield text_line(number, raw)
    reader.close()


def _next(reader: ArrayRecordReader, path: Path, number: int) -> bytes:
    try:
        return reader.read()
    except (RuntimeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: damaged at record {number} ({reason}); make the file anew"
        ) from None


def _is_row(raw: bytes) -> bool:
    if not raw.lstrip().startswith(b"{"):
        return False
    row = parse_line(1, raw, Counter()).row
    try:
        return row is not None and bool(parse_row(row, role="replay"))
    except Refused:
        return False


def check_groups(path: Path) -> None:
    """Refuse a group that would not fit in memory, before the library unpacks it."""
    size = path.stat().st_size
    at = 0  # without the block headers
    with path.open("rb") as file:
        while _physical(at) < size:
            header = _read(file, at, _CHUNK_HEADER)
            if len(header) < _CHUNK_HEADER:
                return  # cut short: the library will say so
            _, n_bytes, _, kind_and_n, unpacked = struct.unpack("<5Q", header)
            if unpacked > MAX_GROUP_BYTES:
                raise ValueError(
                    f"{path}: damaged, or a group of records of {unpacked:,} bytes; "
                    f"expected at most {MAX_GROUP_BYTES:,}; write it with a smaller "
                    "group_size"
                )
            least = _begin(at) + (kind_and_n >> 8)
            at = max(at + _CHUNK_HEADER + n_bytes, _without_headers(least))


def _physical(at: int) -> int:
    block, inside = divmod(at, _BLOCK - _BLOCK_HEADER)
    return block * _BLOCK + _BLOCK_HEADER + inside


def _begin(at: int) -> int:
    """Where a chunk begins: before the block header, if one is there."""
    at = _physical(at)
    return at - _BLOCK_HEADER if at % _BLOCK == _BLOCK_HEADER else at


def _without_headers(at: int) -> int:
    block, inside = divmod(at, _BLOCK)
    return block * (_BLOCK - _BLOCK_HEADER) + max(0, inside - _BLOCK_HEADER)


def _read(file, at: int, n: int) -> bytes:
    """Bytes that a block header may interrupt."""
    made = b""
    while n:
        start = _physical(at)
        take = min(n, _BLOCK - start % _BLOCK)
        file.seek(start)
        part = file.read(take)
        made, at, n = made + part, at + take, n - take
        if len(part) < take:
            break
    return made
