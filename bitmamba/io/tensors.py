"""safetensors files of others: the header is checked before anything is allocated.

The format is 8 bytes (the header's length), a JSON header {name: {dtype, shape,
data_offsets}}, and the tensors' bytes end to end. The library that then reads them
checks again; it knows dtypes that numpy does not, and its errors name no file.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from bitmamba.io.json_file import parse_json

MAX_HEADER_BYTES = 4 * 2**20
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8
_N_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1}
_N_BYTES |= {f"{kind}{8 * n}": n for kind in "IU" for n in (1, 2, 4, 8)}
FLOATS = ("F64", "F32", "F16", "BF16")


class Entry(NamedTuple):
    """One tensor, as the header has it. offsets: of its bytes, after the header."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]


def read_header(file: Path) -> dict[str, Entry]:
    """What a safetensors file says that it holds, and does.

    Raises:
        ValueError: one line naming file and tensor: not the format, cut, a size or an
            offset that cannot be, bytes that belong to no tensor or to two.
    """
    n_file = file.stat().st_size
    with file.open("rb") as opened:
        n_header = int.from_bytes(opened.read(8), "little")
        if not 2 <= n_header <= min(MAX_HEADER_BYTES, n_file - 8):
            raise ValueError(
                f"{file}: got {n_file:,} bytes, of which the header says to be "
                f"{n_header:,}; expected a whole safetensors file"
            )
        raw = opened.read(n_header)
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise ValueError(
            f"{file}: the header is not JSON ({error}); expected a safetensors file"
        ) from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ValueError(
            f"{file}: the header is no table of at most {MAX_TENSORS:,} tensors"
        )
    header.pop("__metadata__", None)
    table = {
        name: _entry(f"{file}: {name[:200]}", value) for name, value in header.items()
    }
    _check_ranges(file, table, n_file - 8 - n_header)
    return table


def read_tensors(file: Path, header: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    """The tensors of a file whose header was read.

    Raises:
        ValueError: they are not what the header says.
    """
    check_fits(str(file), sum(e.offsets[1] - e.offsets[0] for e in header.values()))
    try:
        tensors = load_file(file)
    except MemoryError:
        raise
    except Exception as error:  # the library raises its own, KeyError and TypeError
        reason = str(error)[:120]
        raise ValueError(
            f"{file}: {reason}; expected a whole safetensors file"
        ) from None
    if {n: v.shape for n, v in tensors.items()} != {
        n: e.shape for n, e in header.items()
    }:
        raise ValueError(f"{file}: changed while it was read; try again")
    return tensors


def check_fits(where: str, n_bytes: int) -> None:
    """Refuse to read what this machine's memory cannot hold.

    Raises:
        ValueError: more bytes than there is memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes > memory:
        raise ValueError(
            f"{where}: {n_bytes / 2**30:,.1f} GiB of arrays; expected at most "
            f"{memory / 2**30:,.1f} GiB, the memory of this machine"
        )


def _entry(where: str, value: Any) -> Entry:
    """One entry of the header, checked by itself."""
    if not isinstance(value, dict) or value.keys() != {
        "dtype",
        "shape",
        "data_offsets",
    }:
        raise ValueError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _N_BYTES:
        raise ValueError(
            f"{where}: got dtype {str(dtype)[:40]!r}; expected one of "
            f"{', '.join(_N_BYTES)}"
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{where}: got shape {str(shape)[:80]}; expected sizes >= 0")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{where}: got data_offsets {str(offsets)[:80]}; expected [begin, end]"
        )
    n_bytes = math.prod(shape) * _N_BYTES[dtype]
    if offsets[1] - offsets[0] != n_bytes:
        raise ValueError(
            f"{where}: got {offsets[1] - offsets[0]:,} bytes for {dtype}{shape}; "
            f"expected {n_bytes:,}"
        )
    return Entry(dtype, tuple(shape), tuple(offsets))


def _are_sizes(value: Any) -> bool:
    """A list of whole numbers that an address can hold."""
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**48 for v in value
    )


def _check_ranges(file: Path, table: Mapping[str, Entry], n_data: int) -> None:
    """The tensors' ranges follow one another from the first byte to the last."""
    at = 0
    for name, entry in sorted(table.items(), key=lambda item: item[1].offsets):
        begin, end = entry.offsets
        if begin != at:
            raise ValueError(
                f"{file}: {name[:200]}: begins at byte {begin:,}; expected {at:,}, "
                "where the one before ends"
            )
        at = end
    if at != n_data:
        raise ValueError(
            f"{file}: got {n_data:,} bytes of tensors; expected {at:,} by the header"
        )
