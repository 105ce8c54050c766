"""Parquet files: one column of texts; needs pyarrow, the extra `parquet`.

pyarrow reads in a process of its own (`parquet_worker`): a damaged or hostile file can
make it abort, which would take the run with it, and take memory without a limit.
"""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bitmamba.data.example import Refused
from bitmamba.data.records import Line, text_line, too_long

MAX_GROUP_BYTES = 2**29  # of the column, unpacked
MEMORY_BYTES = 2**31  # of the process, beyond its start
# Answers: a kind and a number; a text's and a complaint's bytes follow.
FRAME = struct.Struct("<cQ")
TEXT, NULL, WRONG, END = b"t", b"n", b"w", b"e"
_MAX_FRAME = 2**31
_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bitmamba.data.shards.parquet_worker import main; main()"
)


def read(path: Path, *, column: str) -> Iterator[Line]:
    """The texts of a column in their order, numbered from 1, as rows.

    Args:
        path: the file.
        column: its name.

    Raises:
        ValueError: pyarrow is missing; not a Parquet file, a damaged one, one that
            takes too much memory, or no such column of texts.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed; "
            "run: pip install 'bitmamba[parquet]' (or pip install pyarrow)"
        )
    asked = {
        "path": str(path.absolute()),
        "column": column,
        "group_bytes": MAX_GROUP_BYTES,
        "memory_bytes": MEMORY_BYTES,
    }
    kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    process = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-c",
            _WORKER,
            json.dumps(sys.path),
            json.dumps(asked),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={k: os.environ[k] for k in kept if k in os.environ},
        start_new_session=True,  # signals of the terminal are not for it
    )
    with process:
        try:
            yield from _lines(process.stdout, path)
        finally:
            process.kill()


def _lines(answers: BinaryIO, path: Path) -> Iterator[Line]:
    number = 0
    while True:
        frame = answers.read(FRAME.size)
        kind, size = FRAME.unpack(frame) if len(frame) == FRAME.size else (b"", 0)
        if kind == END:
            return
        number += 1
        if kind == NULL:
            yield Line(number, None, Refused("not text", "null"), 0)
        elif kind == TEXT and (long := too_long(number, size)):
            yield long
        elif kind in (TEXT, WRONG) and size < _MAX_FRAME:
            raw = answers.read(size)
            if len(raw) == size and kind == TEXT:
                yield text_line(number, raw)
                continue
            raise ValueError(f"{path}: {raw.decode(errors='replace')[:500]}")
        else:
            raise ValueError(
                f"{path}: not a Parquet file, or a damaged one (pyarrow ended at "
                f"record {number}, or was out of memory)"
            )
