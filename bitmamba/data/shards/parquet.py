"""Parquet files: one column of texts; needs pyarrow, the extra `parquet`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitmamba.data.example import Refused
from bitmamba.data.records import Line, text_line, too_long

MAX_GROUP_BYTES = 2**29  # of the column, unpacked
_BYTES_AT_ONCE, _ROWS_AT_ONCE = 2**22, 1024


def read(path: Path, *, column: str) -> Iterator[Line]:
    """The texts of a column in their order, numbered from 1, as rows.

    Args:
        path: the file.
        column: its name.

    Raises:
        ValueError: pyarrow is missing; not a Parquet file, a damaged one, one whose
            row groups are too large for memory, or no such column of texts.
    """
    arrow, parquet = _pyarrow(path)
    try:
        # By the path as a file object: a name is never taken for an address.
        with (
            path.open("rb") as source,
            parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file,
        ):
            number = 0
            rows = _check(file, path, column, arrow)
            for batch in file.iter_batches(
                batch_size=rows, columns=[column], use_threads=False
            ):
                # As bytes: a text that is not UTF-8 is refused alone.
                for value in batch.column(0).cast(arrow.large_binary()):
                    number += 1
                    yield _line(number, value.as_py())
    except (arrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: not a Parquet file, or a damaged one ({reason})"
        ) from None


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed; "
            "run: pip install 'bitmamba[parquet]' (or pip install pyarrow)"
        ) from None
    return pyarrow, pyarrow.parquet


def _check(file: Any, path: Path, column: str, arrow: Any) -> int:
    """Refuse what cannot be read; how many rows to read at once."""
    schema = file.schema_arrow
    if schema.names.count(column) != 1:
        raise ValueError(
            f"{path}: got no column {column!r}, or two of them; it has "
            f"{', '.join(schema.names[:20])}; set config.data.text_column"
        )
    kind = schema.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise ValueError(
            f"{path}: column {column!r} is {kind}; expected string; set "
            "config.data.text_column"
        )
    # A plain column has one leaf, so its index in the schema counts the leaves before.
    names = [file.schema.column(i).path for i in range(len(file.schema))]
    leaf, average = names.index(column), 1
    for i in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(i)
        n_bytes = group.column(leaf).total_uncompressed_size
        if n_bytes > MAX_GROUP_BYTES:
            raise ValueError(
                f"{path}: row group {i} has {n_bytes:,} bytes of {column!r}; expected "
                f"at most {MAX_GROUP_BYTES:,}; write it with smaller row groups"
            )
        average = max(average, n_bytes // max(1, group.num_rows))
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // average))


def _line(number: int, raw: bytes | None) -> Line:
    if raw is None:
        return Line(number, None, Refused("not text", "null"), 0)
    return too_long(number, len(raw)) or text_line(number, raw)
