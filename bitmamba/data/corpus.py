"""Documents of many token files as one store: what is small in memory, tokens on disk.

About 20 bytes of memory a document, whatever its length.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from bitmamba.data.token_file import DamagedTokensError, TokenFile


class Corpus:
    """Documents end to end, file after file; as `TokenStore`, but read when asked for.

    files: in order. keep: for each, (documents,) bool, or None for all: which of its
    documents are in the store. source: the category of all.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        *,
        keep: Sequence[np.ndarray | None] | None = None,
        source: int = 0,
    ):
        self._files, starts, lengths = list(files), [], []
        kept = []
        for file, chosen in zip(files, keep or [None] * len(files), strict=True):
            n = file.lengths
            start = np.cumsum(n, dtype=np.int64) - n
            if chosen is not None:
                n, start = n[chosen], start[chosen]
                kept.append(hashlib.sha256(np.packbits(chosen)).hexdigest())
            else:
                kept.append("")
            starts.append(start)
            lengths.append(n)
        # Which document is the first of each file.
        self._first = np.cumsum([0, *map(len, lengths)])
        self._starts = _joined(starts, np.int64)
        self.lengths = _joined(lengths, np.uint32)
        # One number for all documents takes the memory of one.
        self.sources = np.broadcast_to(np.int32(source), self.lengths.shape)
        made = [[f.digest, k] for f, k in zip(self._files, kept, strict=True)]
        self._digest = hashlib.sha256(repr(made).encode()).hexdigest()
        self._weighted = any(file.has_weights for file in files)

    @property
    def n_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def digest(self) -> str:
        """sha256 that stands for the contents: of the files' own."""
        return self._digest

    def span(
        self, document: int, first: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens first … end of a document, and their float32 loss weights.

        Raises:
            DamagedTokensError: the cache is damaged (the file is then removed from
                it), or gone.
        """
        index = int(np.searchsorted(self._first, document, side="right")) - 1
        file, base = self._files[index], int(self._starts[document])
        start, stop = base + int(first), base + int(end)
        try:
            return file.read(start, stop), file.weights(start, stop)
        except DamagedTokensError as damage:
            file.remove()
            raise DamagedTokensError(
                f"data.token_cache: {damage}; removed: start again, with the same "
                "command, and it is made anew"
            ) from None
        except OSError as error:
            raise DamagedTokensError(
                f"data.token_cache: {file.path}: {error.strerror}; expected the tokens "
                "that were there when the run began; start again, with the same command"
            ) from None

    def n_trained(self, spans: np.ndarray) -> np.ndarray:
        """(n,) int64, targets with loss in each of (n, 3) document, first, end."""
        if not self._weighted:
            return spans[:, 2] - spans[:, 1] - 1
        weights = (self.span(*span)[1][1:] for span in spans)
        return np.fromiter((np.count_nonzero(w) for w in weights), np.int64)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
