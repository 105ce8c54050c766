"""Writes files of the token cache, whose form `token_file` tells."""

import hashlib
import io
import json
import os
import tempfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from bitmamba.data.encode import Encoded
from bitmamba.data.token_file import BLOCK, MARK, TAIL, VERSION


class _Checked:
    """Writes bytes, with the checksums of their blocks and a hash of them all."""

    def __init__(self, file: io.IOBase):
        self.file, self.sha256 = file, hashlib.sha256()
        self.n_bytes = 0
        self._done, self._crc = array("I"), 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        left = memoryview(data)
        while left:
            room = BLOCK - self.n_bytes % BLOCK
            part, left = left[:room], left[room:]
            self._crc = zlib.crc32(part, self._crc)
            self.n_bytes += len(part)
            if self.n_bytes % BLOCK == 0:
                self._done.append(self._crc)
                self._crc = 0

    def checks(self) -> array:
        return self._done + array("I", [self._crc] if self.n_bytes % BLOCK else [])


class TokenWriter:
    """Writes such a file, document after document.

    Args:
        path: the file, made or emptied. It is whole once `finish` has returned.
        dtype: of the tokens, uint16 or int32.
    """

    def __init__(self, path: Path, *, dtype: np.dtype):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file = path.open("wb")
        self._tokens = _Checked(self._file)
        self._weights: _Checked | None = None
        self._lengths, self._keys, self._records = array("I"), array("Q"), array("q")
        self._highest = -1

    def add(self, document: Encoded, *, key: int, record: int) -> None:
        """A document; `key`: hash of its content, `record`: its place in the shard."""
        if self._weights is None and not (document.weights == 1).all():
            self._begin_weights()
        self._tokens.write(document.tokens.astype(self._dtype).tobytes())
        if self._weights is not None:
            self._weights.write(document.weights.astype("<f4").tobytes())
        self._lengths.append(len(document.tokens))
        self._keys.append(key)
        self._records.append(record)
        self._highest = max(self._highest, int(document.tokens.max()))

    def finish(self, **meta: Any) -> None:
        """Write the rest, with `meta` (JSON), down to the disk."""
        weights = self._weights or _Checked(io.BytesIO())
        if self._weights is not None:
            self._append(self._weights.file)
        checks = self._tokens.checks() + weights.checks()
        small = {
            "lengths": np.array(self._lengths, "<u4"),
            "keys": np.array(self._keys, "<u8"),
            "records": np.array(self._records, "<i8"),
            "checks": np.array(checks, "<u4"),
        }
        digests = {n: hashlib.sha256(a).hexdigest() for n, a in small.items()}
        for part in small.values():
            self._file.write(part)
        described = {
            **meta,
            "version": VERSION,
            "dtype": self._dtype.str,
            "highest": self._highest,
            "counts": {
                "tokens": self._tokens.n_bytes // self._dtype.itemsize,
                "weights": weights.n_bytes // 4,
                "documents": len(self._lengths),
                "checks": len(checks),
            },
            "sha256": {
                "tokens": self._tokens.sha256.hexdigest(),
                "weights": weights.sha256.hexdigest(),
                **digests,
            },
        }
        raw = json.dumps(described).encode()
        self._file.write(raw)
        self._file.write(TAIL.pack(hashlib.sha256(raw).digest(), len(raw), MARK))
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Let others see how far it is."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        if self._weights is not None:
            self._weights.file.close()

    def _begin_weights(self) -> None:
        """From the first weight that is not 1 on; those before it are."""
        folder = os.path.dirname(self._file.name)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by `close`
        self._weights = _Checked(file)
        left = self._tokens.n_bytes // self._dtype.itemsize
        ones = np.ones(2**16, "<f4")
        while left:
            n = min(left, len(ones))
            self._weights.write(ones[:n].tobytes())
            left -= n

    def _append(self, file: io.IOBase) -> None:
        file.seek(0)
        while part := file.read(2**20):
            self._file.write(part)
