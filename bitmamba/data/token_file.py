"""One file of the token cache: the tokens of a shard, and what became of its records.

    tokens | weights | lengths | keys | records | checks | JSON | its sha256, size, mark

Sizes and places follow from the counts in the JSON, so nothing in a file says where to
read. The small arrays are verified when a file is opened. Tokens are not read then:
each 16 KiB of them has a checksum, which is verified whenever some of it is read.
"""

import contextlib
import hashlib
import itertools
import json
import os
import struct
import zlib
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
BLOCK = 2**14  # bytes with a checksum of their own
MARK = b"BMTOKENS"
TAIL = struct.Struct("<32sQ8s")
_MAX_META_BYTES = 2**24
# Name, dtype (None: of the tokens), and what there are as many of.
_SECTIONS = (
    ("tokens", None, "tokens"),
    ("weights", "<f4", "weights"),
    ("lengths", "<u4", "documents"),
    ("keys", "<u8", "documents"),
    ("records", "<i8", "documents"),
    ("checks", "<u4", "checks"),
)
_LARGE = ("tokens", "weights")
_DTYPES = ("<u2", "<i4")
_OPEN_AT_ONCE = 256  # a process may have 1024; there may be more shards
_serial = itertools.count()


class _Opened:
    """A file that is open as long as somebody reads it."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _opened(path: Path, serial: int) -> _Opened:
    return _Opened(path)


class DamagedTokensError(ValueError):
    """A file of the cache is not what was written."""


class TokenFile:
    """An open file of the cache; what is small of it is in memory.

    Args:
        path: the file.

    Raises:
        DamagedTokensError: not such a file, or not as it was written.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._serial = next(_serial)  # never the file that lay there before
        try:
            self.meta = self._read_meta()
            self._check_small()
        except DamagedTokensError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedTokensError(f"{path}: {error}") from None

    @property
    def n_tokens(self) -> int:
        return self.meta["counts"]["tokens"]

    @property
    def n_documents(self) -> int:
        return self.meta["counts"]["documents"]

    @property
    def has_weights(self) -> bool:
        return self.meta["counts"]["weights"] > 0

    @property
    def digest(self) -> str:
        """sha256 of what is trained: tokens, weights, and where documents end."""
        made = [self.meta["sha256"][n] for n in ("tokens", "weights", "lengths")]
        return hashlib.sha256(" ".join(made).encode()).hexdigest()

    @property
    def lengths(self) -> np.ndarray:
        """(documents,) uint32, tokens of each."""
        return self._section("lengths")

    @property
    def keys(self) -> np.ndarray:
        """(documents,) uint64, hash of each one's content."""
        return self._section("keys")

    @property
    def records(self) -> np.ndarray:
        """(documents,) int64, the number of the record that each was made of."""
        return self._section("records")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop.

        Raises:
            DamagedTokensError: they are not what was written.
        """
        return self._checked("tokens", start, stop)

    def weights(self, start: int, stop: int) -> np.ndarray:
        """Loss weights of tokens start … stop, float32; raises as `read`."""
        if not self.has_weights:
            return np.ones(stop - start, np.float32)
        return self._checked("weights", start, stop)

    def remove(self) -> None:
        """Out of the cache, unless another lies there by now."""
        with contextlib.suppress(OSError):
            mine = os.fstat(_opened(self.path, self._serial).number)
            if os.path.samestat(mine, self.path.stat()):
                self.path.unlink()

    def _read_meta(self) -> dict[str, Any]:
        size = os.fstat(_opened(self.path, self._serial).number).st_size
        tail = self._bytes(size - TAIL.size, TAIL.size) if size > TAIL.size else b""
        if not tail.endswith(MARK):
            raise ValueError("no file of tokens, or one that was not finished")
        sha256, n_bytes, _ = TAIL.unpack(tail)
        if n_bytes > min(_MAX_META_BYTES, size - TAIL.size):
            raise ValueError(f"a description of {n_bytes:,} bytes")
        raw = self._bytes(size - TAIL.size - n_bytes, n_bytes)
        if hashlib.sha256(raw).digest() != sha256:
            raise ValueError("its description is damaged")
        meta = json.loads(raw)
        if meta["version"] != VERSION or meta["dtype"] not in _DTYPES:
            raise ValueError(f"version {meta['version']}; expected {VERSION}")
        counts = meta["counts"]
        if not all(isinstance(n, int) and n >= 0 for n in counts.values()):
            raise ValueError(f"counts {counts}")
        if counts["weights"] not in (0, counts["tokens"]):
            raise ValueError(f"{counts['weights']} weights; {counts['tokens']} tokens")
        self._places, at = {}, 0
        for name, dtype, count in _SECTIONS:
            dtype = np.dtype(dtype or meta["dtype"])
            self._places[name] = (at, counts[count], dtype)
            at += counts[count] * dtype.itemsize
        if at + n_bytes + TAIL.size != size:
            raise ValueError(f"{size:,} bytes; expected {at + n_bytes + TAIL.size:,}")
        return meta

    def _check_small(self) -> None:
        for name, _, _ in _SECTIONS:
            if name not in _LARGE:
                found = hashlib.sha256(self._section(name)).hexdigest()
                if found != self.meta["sha256"][name]:
                    raise ValueError(f"its {name} are damaged")
        if self.lengths.sum(dtype=np.int64) != self.n_tokens:
            raise ValueError("its lengths are not those of its tokens")
        n_blocks = sum(_n_blocks(self._places[name]) for name in _LARGE)
        if n_blocks != self.meta["counts"]["checks"]:
            raise ValueError("its checksums are not those of its tokens")

    def _section(self, name: str) -> np.ndarray:
        at, count, dtype = self._places[name]
        raw = self._bytes(at, count * dtype.itemsize)
        return np.frombuffer(raw, dtype)

    @cached_property
    def _checks(self) -> dict[str, np.ndarray]:
        every, n = self._section("checks"), _n_blocks(self._places["tokens"])
        return {"tokens": every[:n], "weights": every[n:]}

    def _checked(self, name: str, start: int, stop: int) -> np.ndarray:
        at, count, dtype = self._places[name]
        assert 0 <= start <= stop <= count
        first = start * dtype.itemsize // BLOCK
        last = -(-stop * dtype.itemsize // BLOCK)
        end = min(last * BLOCK, count * dtype.itemsize)
        raw = memoryview(self._bytes(at + first * BLOCK, end - first * BLOCK))
        for i, expected in enumerate(self._checks[name][first:last].tolist()):
            if zlib.crc32(raw[i * BLOCK : (i + 1) * BLOCK]) != expected:
                raise DamagedTokensError(f"{self.path}: its {name} are damaged")
        found = np.frombuffer(raw, dtype)
        shift = first * BLOCK // dtype.itemsize
        return found[start - shift : stop - shift]

    def _bytes(self, at: int, n: int) -> bytes:
        """By `pread`: threads share the file, and nothing stays in this process."""
        file = _opened(self.path, self._serial)
        made = os.pread(file.number, n, at)
        while len(made) < n:
            part = os.pread(file.number, n - len(made), at + len(made))
            if not part:
                raise DamagedTokensError(f"{self.path}: cut short")
            made += part
        return made


def _n_blocks(place: tuple[int, int, np.dtype]) -> int:
    _, count, dtype = place
    return -(-count * dtype.itemsize // BLOCK)
