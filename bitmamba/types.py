"""Shared types and the one axis legend. Imports nothing of ours.

Axes, in docstrings and einsums:
    B batch   L length   D d_model   E d_inner   V vocabulary   H heads
    P headdim   G groups sharing B and C   N d_state   K d_conv   Q chunk_size
    R adapter rank   M micro-batches (gradient accumulation)
An upper-case *name* is the symbol of the state-space papers (A, B, C, D).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # reading data must not wait for JAX to load
    import jax
    import numpy as np

# Last parts of the paths of what adapters train.
STATE_OFFSET = "state_offset"
ADAPTER_LEAVES = ("a", "b", "magnitude", STATE_OFFSET)

Params: TypeAlias = Mapping[str, Any]
Array: TypeAlias = "jax.Array | np.ndarray"


class Batch(NamedTuple):
    """Packed windows; every field is (B, L), or (M, B, L) with accumulation.

    tokens: int32. Inputs; 0 where padded.
    targets: int32. The next token of the same document; 0 where there is none.
    loss_weights: float32. 0 on prompts, padding and last tokens of documents.
    segment_ids: int32. 1, 2, ... per document in the window; 0 is padding.
    positions: int32. Restart at 0 with every document.
    source_ids: int32. Category of the document; index into the plan's categories.
    """

    tokens: Array
    targets: Array
    loss_weights: Array
    segment_ids: Array
    positions: Array
    source_ids: Array


class BatchWithBase(NamedTuple):
    """A `Batch`, and the base's largest logits of each token: (B, L, K), (M, B, L, K).

    base_ids: int32, distinct. base_logits: float32.
    """

    tokens: Array
    targets: Array
    loss_weights: Array
    segment_ids: Array
    positions: Array
    source_ids: Array
    base_ids: Array
    base_logits: Array


class Features(NamedTuple):
    """What the head sees: logits are `hidden @ head`, never formed by the model.

    hidden: (B, L, D), after the final norm and, for a ternary head, quantised.
    head: (D, V), the effective (for a ternary head: quantised) weight; of a frozen
        ternary head its codes, and hidden is then times their scale.
    """

    hidden: jax.Array
    head: jax.Array


class AdapterSite(NamedTuple):
    """A weight that can be adapted.

    path: of the weight without its last part, "layer_0/mixer/in_proj".
    kind: of the layer ("mamba2", ...), or "embed", "head".
    projection: last part of the path, "in_proj".
    shape: (D, F) of the weight.
    slices: (name, first column, column after the last) of a fused projection.
    """

    path: str
    kind: str
    projection: str
    shape: tuple[int, int]
    slices: tuple[tuple[str, int, int], ...] = ()


class AdapterSpec(NamedTuple):
    """One low-rank adapter: y[..., start:stop] += scale · (x @ a) @ b.

    path: of its leaves; the site's, and the slice's name where it adapts a slice:
        "layer_0/mixer/in_proj/dt" has the leaves ".../dt/a" and ".../dt/b".
    site: path of the adapted weight.
    shape: (D, F) of the adapted weight, or of the slice of it.
    start: first adapted column of the weight.
    rank, scale: R, and alpha / rank (or alpha / sqrt(rank)).
    dropout: share of the branch's inputs that are dropped in training.
    magnitude: it also learns the length of each column (DoRA).
    """

    path: str
    site: str
    shape: tuple[int, int]
    start: int
    rank: int
    scale: float
    dropout: float = 0.0
    magnitude: bool = False


class Tokenizer(Protocol):
    """Text to token ids and back; see `bitmamba.io.tokenizer`."""

    vocab_size: int
    pad_id: int
    eot_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...
