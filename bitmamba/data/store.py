"""All tokens of one stream in flat arrays; documents are ranges of them."""

import hashlib
from typing import NamedTuple, Protocol

import numpy as np

from bitmamba.data.encode import Encoded


class DocumentStore(Protocol):
    """What the plan and its windows ask of a stream: `TokenStore`, or a `Corpus`.

    lengths: (documents,) int, tokens of each. sources: (documents,) int32, categories.
    n_tokens: of all documents.
    """

    lengths: np.ndarray
    sources: np.ndarray
    n_tokens: int

    def digest(self) -> str: ...

    def span(
        self, document: int, first: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def n_trained(self, spans: np.ndarray) -> np.ndarray: ...


class TokenStore(NamedTuple):
    """Documents end to end.

    tokens: (n,) uint16 or int32. offsets: (documents + 1,) int64 into tokens.
    weights: (n,) float32 loss weights, or None where all are 1.
    sources: (documents,) int32, the category of each.
    """

    tokens: np.ndarray
    weights: np.ndarray | None
    offsets: np.ndarray
    sources: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def span(
        self, document: int, first: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens first … end of a document, and their float32 loss weights."""
        base = int(self.offsets[document])
        start, stop = base + int(first), base + int(end)
        return self.tokens[start:stop], self.weights_of(start, stop)

    def n_trained(self, spans: np.ndarray) -> np.ndarray:
        """(n,) int64, targets with loss in each of (n, 3) document, first, end."""
        document, first, end = spans.T
        if self.weights is None:
            return end - first - 1
        before = np.concatenate([[0], np.cumsum(self.weights > 0)])
        base = self.offsets[document]
        return before[base + end] - before[base + first + 1]

    def weights_of(self, start: int, stop: int) -> np.ndarray:
        """Loss weights of tokens start … stop of the flat array."""
        if self.weights is None:
            return np.ones(stop - start, np.float32)
        return self.weights[start:stop]

    def digest(self) -> str:
        """sha256 over the contents, whatever the integer width."""
        made = hashlib.sha256()
        for array, dtype in (
            (self.tokens, "<i4"),
            (self.offsets, "<i8"),
            (self.sources, "<i4"),
        ):
            made.update(np.ascontiguousarray(array, dtype))
        if self.weights is not None:
            made.update(np.ascontiguousarray(self.weights, "<f4"))
        return made.hexdigest()


class StoreBuilder:
    """Collects documents; chunks are joined once, at the end."""

    def __init__(self, *, vocab_size: int):
        self._dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        self._tokens: list[np.ndarray] = []
        self._weights: list[np.ndarray | None] = []
        self._sources: list[int] = []

    def add(self, document: Encoded, source: int) -> None:
        weights = None if (document.weights == 1).all() else document.weights
        self._tokens.append(document.tokens.astype(self._dtype))
        self._weights.append(weights)
        self._sources.append(source)

    def build(self) -> TokenStore:
        lengths = np.array([len(t) for t in self._tokens], np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        weights = None
        if any(w is not None for w in self._weights):
            # The array is float32 from the start: the first document does not decide.
            weights = np.ones(int(offsets[-1]), np.float32)
            for start, part in zip(offsets[:-1], self._weights, strict=True):
                if part is not None:
                    weights[start : start + len(part)] = part
        tokens = [np.empty(0, self._dtype), *self._tokens]
        return TokenStore(
            np.concatenate(tokens), weights, offsets, np.array(self._sources, np.int32)
        )
