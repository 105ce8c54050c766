"""Segments to tokens and loss weights; the length rules for single documents."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bitmamba.data.chat import DataTokenizer, Segment, Template
from bitmamba.data.example import Example, Refused


class Encoded(NamedTuple):
    """One document.

    tokens: (n,) int32.
    weights: (n,) float32, the loss weight of each token as a target.
    """

    tokens: np.ndarray
    weights: np.ndarray


def encode_examples(
    examples: Sequence[Example],
    *,
    template: Template,
    tokenizer: DataTokenizer,
    thought: bool = True,
) -> list[Encoded | Refused]:
    """Encode many rows at once (the tokenizer works on batches in parallel).

    Args:
        examples: rows.
        template: writes the conversations.
        tokenizer: encodes the pieces.
        thought: write the thoughts of the answers, or leave them out.

    Returns:
        For each row its document, or why it has none.
    """
    rows = [
        _fitting(_segments(e, template, thought=thought), tokenizer) for e in examples
    ]
    flat = [s for row in rows if not isinstance(row, Refused) for s in row]
    ids = iter(_encode_segments(flat, tokenizer))
    made: list[Encoded | Refused] = []
    for example, row in zip(examples, rows, strict=True):
        if isinstance(row, Refused):
            made.append(row)
        elif example.ids is not None:
            made.append(_encoded(example.ids, example.mask, example.weight))
        else:
            parts = [(next(ids), segment.trained) for segment in row]
            made.append(_document(parts, example, tokenizer))
    return made


def encode_prompt(segments: Sequence[Segment], tokenizer: DataTokenizer) -> list[int]:
    """Tokens of an unfinished document, to be continued by a model."""
    ids = [i for part in _encode_segments(segments, tokenizer) for i in part]
    whole = np.asarray(ids, np.int32)
    return _with_one_bos(whole, np.zeros(len(ids), np.float32), tokenizer)[0].tolist()


def _segments(
    example: Example, template: Template, *, thought: bool
) -> list[Segment] | Refused:
    if example.ids is not None:
        return []
    if example.text is not None:
        return [Segment(example.text, True), Segment("", True, end=True)]
    messages = example.messages
    if not thought:
        messages = tuple(m._replace(thought="") for m in messages)
    try:
        return template.segments(messages)
    except Refused as refused:
        return refused


def _fitting(
    segments: list[Segment] | Refused, tokenizer: DataTokenizer
) -> list[Segment] | Refused:
    """The segments, or why one of them would take too much memory."""
    if not isinstance(segments, Refused):
        for segment in segments:
            if reason := tokenizer.too_long(segment.text):
                return Refused("too long to encode at once", reason)
    return segments


def _encode_segments(
    segments: Sequence[Segment], tokenizer: DataTokenizer
) -> list[Sequence[int]]:
    """Markup and content apart, each in one batch."""
    made: list[Sequence[int]] = [[tokenizer.eot_id] if s.end else [] for s in segments]
    for markup, encode in (
        (True, tokenizer.encode_markup),
        (False, tokenizer.encode_content),
    ):
        where = [i for i, s in enumerate(segments) if s.markup == markup and not s.end]
        encoded = encode([segments[i].text for i in where])
        for index, ids in zip(where, encoded, strict=True):
            made[index] = ids
    return made


def _document(
    parts: list[tuple[Sequence[int], bool]], example: Example, tokenizer: DataTokenizer
) -> Encoded:
    """One BOS at most, and an end-of-text to learn from after a last answer."""
    # Arrays: a long text has millions of tokens.
    arrays = [np.asarray(part, np.int32) for part, _ in parts]
    ids = np.concatenate([np.empty(0, np.int32), *arrays])
    mask = np.repeat(
        np.asarray([trained for _, trained in parts], np.float32),
        [len(part) for part, _ in parts],
    )
    last = example.messages[-1] if example.messages else None
    if last and last.role == "assistant" and last.trained:
        if not len(ids) or ids[-1] != tokenizer.eot_id:
            ids = np.append(ids, np.int32(tokenizer.eot_id))
            mask = np.append(mask, np.float32(1))
        mask[-1] = 1
    ids, mask = _with_one_bos(ids, mask, tokenizer)
    return _encoded(ids, mask, example.weight)


def _with_one_bos(
    ids: np.ndarray, mask: np.ndarray, tokenizer: DataTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Exactly one beginning-of-text, untrained, if the tokenizer puts one."""
    bos = tokenizer.bos_id
    if bos is None:
        return ids, mask
    others = np.flatnonzero(ids != bos)
    leading = others[0] if others.size else len(ids)
    begun = np.append(np.int32(bos), ids[leading:])
    return begun, np.append(np.float32(0), mask[leading:])


def _encoded(ids: Sequence[int], mask: Sequence[float], weight: float) -> Encoded:
    return Encoded(
        np.asarray(ids, np.int32), np.asarray(mask, np.float32) * np.float32(weight)
    )


def fit_window(document: Encoded, *, window: int, long: str) -> tuple[Encoded, bool]:
    """Cut an SFT document to the window, or refuse it.

    What is cut is the end. The cut answer then has no end-of-text: it did not end.

    Args:
        document: to be cut if longer than the window.
        window: tokens in a window.
        long: "truncate" or "refuse".

    Returns:
        The document, and whether it was cut.

    Raises:
        Refused: too long and not to be cut, or no token left to train.
    """
    n = len(document.tokens)
    if n > window and long == "refuse":
        raise Refused("longer than the window", f"{n} tokens; the window has {window}")
    kept = Encoded(document.tokens[:window], document.weights[:window])
    if not kept.weights[1:].any():
        first = np.flatnonzero(document.weights[1:])
        if first.size == 0:
            raise Refused("no trained token", "the loss mask is empty")
        need = int(first[0]) + 2
        detail = f"the first is number {need}; the window ends at {window}"
        raise Refused("no trained token in the window", detail)
    return kept, n > window


def split_text(document: Encoded, *, window: int) -> list[Encoded]:
    """Plain text in as few pieces as fit, of like length, each a document of its own.

    Of like length, so that no last piece is a lone end-of-text, which nothing predicts.
    """
    n_pieces = -(-len(document.tokens) // window)
    tokens = np.array_split(document.tokens, n_pieces)
    weights = np.array_split(document.weights, n_pieces)
    return [Encoded(t, w) for t, w in zip(tokens, weights, strict=True)]
