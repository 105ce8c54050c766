"""The process that pyarrow reads a file in; `parquet` starts it and asks it."""

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as arrow
from pyarrow import parquet

from bitmamba.data.records import MAX_LINE_BYTES
from bitmamba.data.shards.parquet import END, FRAME, NULL, TEXT, WRONG

_BYTES_AT_ONCE, _ROWS_AT_ONCE = 2**22, 1024


def main() -> None:
    """Answer with every text of a column, then with the end or what is wrong."""
    asked = json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb", buffering=2**20)
    os.dup2(2, 1)  # what is printed goes nowhere
    _limit_memory(asked["memory_bytes"])
    with contextlib.suppress(BrokenPipeError):
        try:
            _write(answers, asked["path"], asked["column"], asked["group_bytes"])
            answers.write(FRAME.pack(END, 0))
        except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
            said = " ".join(str(error).split())[:300]
            if not isinstance(error, _WrongError):
                said = f"not a Parquet file, or a damaged one ({said})"
            raw = said.encode(errors="replace")
            answers.write(FRAME.pack(WRONG, len(raw)) + raw)
        answers.flush()


class _WrongError(ValueError):
    """A file that pyarrow reads, but we do not."""


def _limit_memory(n_bytes: int) -> None:
    """Beyond what is used already; and no core dump of what aborts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # Linux alone has it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(answers: BinaryIO, path: str, column: str, group_bytes: int) -> None:
    # As a file object: a name is never taken for an address.
    with (
        open(path, "rb") as source,
        parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file,
    ):
        rows = _check(file, column, group_bytes)
        for batch in file.iter_batches(
            batch_size=rows, columns=[column], use_threads=False
        ):
            # As bytes: a text that is not UTF-8 is refused alone.
            for value in batch.column(0).cast(arrow.large_binary()):
                raw = value.as_py()
                if raw is None:
                    answers.write(FRAME.pack(NULL, 0))
                    continue
                answers.write(FRAME.pack(TEXT, len(raw)))
                if len(raw) <= MAX_LINE_BYTES:
                    answers.write(raw)


def _check(file: Any, column: str, group_bytes: int) -> int:
    """Refuse what cannot be read; how many rows to read at once."""
    schema = file.schema_arrow
    if schema.names.count(column) != 1:
        raise _WrongError(
            f"got no column {column!r}, or two of them; it has "
            f"{', '.join(schema.names[:20])}; set config.data.text_column"
        )
    kind = schema.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise _WrongError(
            f"column {column!r} is {kind}; expected string; set config.data.text_column"
        )
    leaf, average = _leaf(file, column), 1
    for i in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(i)
        n_bytes = group.column(leaf).total_uncompressed_size
        if n_bytes > group_bytes:
            raise _WrongError(
                f"row group {i} has {n_bytes:,} bytes of {column!r}; expected at most "
                f"{group_bytes:,}; write it with smaller row groups"
            )
        average = max(average, n_bytes // max(1, group.num_rows))
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // average))


def _leaf(file: Any, column: str) -> int:
    """A nested column has several leaves; one of texts has the one of its name."""
    return [file.schema.column(i).path for i in range(len(file.schema))].index(column)
