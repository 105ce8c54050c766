"""All tokens of one stream in flat arrays; documents are ranges of them."""

import hashlib
from typing import NamedTuple

import numpy as np

from bitmamba.data.encode import Encoded


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
