"""The packing plan: which pieces of which documents share a window, in which order.

A pure function of lengths, settings and seed, made once. A longer plan begins with the
shorter one, so that a run can be continued for more steps. The data state of a run is
its step number.

SFT documents are packed whole, best fit, anew each epoch. Replay text is one endless
stream of documents, cut at the windows' ends: always full, and each piece is isolated.
"""

import bisect
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SFT, REPLAY = 0, 1
_COPIES = 2  # stream number of the generator that spreads repeated documents
VERSION = 1

Span = tuple[int, int, int]  # document, first token, end


class Plan(NamedTuple):
    """Windows in training order.

    streams: (windows,) uint8, SFT or REPLAY: the store that the documents are in.
    offsets: (windows + 1,) int64 into spans.
    spans: (n, 3) int64: document, and the range of its tokens.
    """

    streams: np.ndarray
    offsets: np.ndarray
    spans: np.ndarray

    @property
    def n_windows(self) -> int:
        return len(self.streams)

    def window(self, index: int) -> tuple[int, np.ndarray]:
        """Stream and spans of one window."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        return int(self.streams[index]), self.spans[start:stop]


def make_plan(
    *,
    sft_lengths: np.ndarray,
    sft_sources: np.ndarray,
    replay_lengths: np.ndarray,
    n_windows: int,
    window: int,
    replay_share: float,
    balance: float,
    seed: int,
) -> Plan:
    """Plan a run.

    Args:
        sft_lengths: (documents,) int, tokens of each, at most `window`.
        sft_sources: (documents,) int, category of each.
        replay_lengths: (documents,) int, any length.
        n_windows: how many windows the run needs; epochs follow from it.
        window: tokens in a window.
        replay_share: wanted share of replay tokens; 1 if there are no SFT documents.
        balance: see `DataConfig.balance`.
        seed: of every order in the plan.

    Returns:
        The plan; empty streams are left out.
    """
    sft = replay = None
    if len(sft_lengths):
        copies = copies_per_epoch(sft_lengths, sft_sources, balance)
        sft = _sft_windows(sft_lengths, sft_sources, copies, window, seed)
    if replay_lengths.sum() > 0:
        replay = cut_text(_endless(len(replay_lengths), seed), replay_lengths, window)
    if sft is None or replay is None or replay_share == 0:
        only, stream = (replay, REPLAY) if sft is None else (sft, SFT)
        chosen = ((stream, next(only)) for _ in range(n_windows if only else 0))
    else:
        chosen = _interleave(sft, replay, n_windows, replay_share)
    return as_plan(chosen)


def as_plan(windows: Iterable[tuple[int, Sequence[Span]]]) -> Plan:
    """Windows, each a stream and its spans, as arrays."""
    # Not lists: a long run has millions of spans.
    streams, counts, spans = array("B"), array("q", [0]), array("q")
    for stream, window in windows:
        streams.append(stream)
        counts.append(len(window))
        for span in window:
            spans.extend(span)
    return Plan(
        np.array(streams, np.uint8),
        np.cumsum(np.array(counts, np.int64)),
        np.array(spans, np.int64).reshape(-1, 3),
    )


def plan_digest(settings: Mapping[str, Any]) -> str:
    """sha256 of everything that determines a plan (plain JSON data)."""
    text = json.dumps({"version": VERSION, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _generator(seed: int, stream: int, epoch: int) -> np.random.Generator:
    sequence = np.random.SeedSequence([seed, stream, epoch])
    return np.random.Generator(np.random.PCG64(sequence))


def copies_per_epoch(
    lengths: np.ndarray, sources: np.ndarray, balance: float
) -> np.ndarray:
    """How often a document of each category is seen in an epoch; at least once.

    Shares become proportional to n_tokens ** balance: the largest category is seen
    once, smaller ones (n_tokens / largest) ** (balance - 1) times.

    Returns:
        (categories,) float64; 1 for categories without documents.
    """
    tokens = np.bincount(sources, weights=lengths).astype(np.float64)
    present = tokens > 0
    copies = np.ones(len(tokens))
    copies[present] = (tokens[present] / tokens.max()) ** (balance - 1.0)
    return copies


def _epoch_documents(
    sources: np.ndarray, copies: np.ndarray, seed: int
) -> Iterator[np.ndarray]:
    """Documents of epoch 0, 1, …, those of small categories repeated.

    With 2.3 copies, 3 documents of 10 are seen three times in an epoch, the others
    twice; over the epochs the surplus goes round all of them.
    """
    n = len(sources)
    phase = np.empty(n)
    rng = _generator(seed, _COPIES, 0)
    for category in np.unique(sources):
        members = np.flatnonzero(sources == category)
        phase[rng.permutation(members)] = (np.arange(len(members)) + 0.5) / len(members)
    rate = copies[sources]
    epoch = 0
    while True:
        before, after = np.floor(rate * epoch + phase), rate * (epoch + 1) + phase
        times = (np.floor(after) - before).astype(np.int64)
        documents = np.repeat(np.arange(n), times)
        yield _generator(seed, SFT, epoch).permutation(documents)
        epoch += 1


def _sft_windows(
    lengths: np.ndarray,
    sources: np.ndarray,
    copies: np.ndarray,
    window: int,
    seed: int,
) -> Iterator[list[Span]]:
    """Epoch after epoch, packed in random order, the windows shuffled again.

    Best fit opens the windows in the order of the documents; without the second
    shuffle an epoch would end with the documents that fit nowhere.
    """
    for epoch, order in enumerate(_epoch_documents(sources, copies, seed)):
        packed = best_fit(order, lengths, window)
        rng = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([seed, SFT, epoch, 1]))
        )
        for index in rng.permutation(len(packed)):
            yield packed[index]


def best_fit(
    order: Iterable[int], lengths: np.ndarray, window: int
) -> list[list[Span]]:
    """Whole documents into windows: each where the least room is left, first come."""
    windows: list[list[Span]] = []
    rooms: list[int] = []  # sorted sizes of the gaps
    open_windows: dict[int, list[int]] = {}  # gap -> windows with it
    for document in order:
        n = int(lengths[document])
        assert 0 < n <= window
        at = bisect.bisect_left(rooms, n)
        if at < len(rooms):
            room = rooms[at]
            index = open_windows[room].pop()
            if not open_windows[room]:
                del open_windows[room]
                rooms.pop(at)
        else:
            room, index = window, len(windows)
            windows.append([])
        windows[index].append((int(document), 0, n))
        if left := room - n:
            if left not in open_windows:
                bisect.insort(rooms, left)
                open_windows[left] = []
            open_windows[left].append(index)
    return windows


def _endless(n_documents: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        # What permutation(n_documents) gives, in half of the memory.
        order = np.arange(n_documents, dtype=np.uint32 if n_documents < 2**32 else int)
        _generator(seed, REPLAY, epoch).shuffle(order)
        yield from order
        epoch += 1


def cut_text(
    documents: Iterable[int], lengths: np.ndarray, window: int
) -> Iterator[list[Span]]:
    """Documents end to end, cut where windows end; only the last may have room."""
    spans: list[Span] = []
    room = window
    for document in documents:
        start, n = 0, int(lengths[document])
        while start < n:
            stop = start + min(room, n - start)
            spans.append((int(document), start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield spans
                spans, room = [], window
    if spans:
        yield spans


def _interleave(
    sft: Iterator[list[Span]],
    replay: Iterator[list[Span]],
    n_windows: int,
    share: float,
) -> Iterator[tuple[int, list[Span]]]:
    """The next window is of the stream that brings the share of tokens nearer.

    So after any number of windows the share is off by less than a window.
    """
    total = replayed = 0
    next_sft, next_replay = next(sft), next(replay)
    for _ in range(n_windows):
        if_sft, if_replay = total + _size(next_sft), total + _size(next_replay)
        error_sft = abs(replayed - share * if_sft)
        error_replay = abs(replayed + _size(next_replay) - share * if_replay)
        if error_replay < error_sft:
            total, replayed = if_replay, replayed + _size(next_replay)
            yield REPLAY, next_replay
            next_replay = next(replay)
        else:
            total = if_sft
            yield SFT, next_sft
            next_sft = next(sft)


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for _, start, stop in spans)
