"""A tokenizer.json of others: what the library does not check before it runs it.

The file holds regular expressions and replacements, which run in this process for as
long as they take; a file that lets text grow without bound, or that encodes the same
text differently each time, is refused. The library panics on some files; its panics are
no `Exception`.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from bitmamba.io.json_file import parse_json
from bitmamba.io.pieces import can_be_cut

MAX_BYTES = 128 * 2**20
# How far replacements may lengthen a text, one after another.
MAX_GROWTH = 1024


def load(data: bytes, *, where: str) -> tuple[Any, Any, list[str], bool]:
    """Two equal tokenizers, the contents of their special tokens, `can_be_cut`.

    Raises:
        ValueError: one line: not a tokenizer.json, or one that cannot be trusted with
            texts.
    """
    import tokenizers  # the byte tokenizer does without

    with one_sentence(
        f"{where}: not a tokenizer.json",
        "; expected the JSON file of the tokenizers library",
    ):
        described = parse_json(data)
        text = data.decode("utf-8")
        pair = tuple(tokenizers.Tokenizer.from_str(text) for _ in range(2))
        added = described.get("added_tokens") or []
        vocabulary = pair[0].get_vocab(with_added_tokens=True)
        special = [t["content"] for t in added if t["special"]]
        special = [content for content in special if content in vocabulary]
        cut = can_be_cut(described)
    for one in pair:
        # Files in circulation carry the settings of their last use.
        one.no_truncation()
        one.no_padding()
    if (described.get("model") or {}).get("dropout"):
        raise ValueError(
            f"{where}: model.dropout: got {described['model']['dropout']}; expected "
            "none: the same text must always be the same tokens"
        )
    if _growth([described.get("normalizer"), described.get("pre_tokenizer")]) > (
        MAX_GROWTH
    ):
        raise ValueError(
            f"{where}: its replacements may lengthen a text more than "
            f"{MAX_GROWTH}-fold; expected fewer, or shorter ones"
        )
    return *pair, special, cut


@contextlib.contextmanager
def one_sentence(where: str, then: str = "") -> Iterator[None]:
    """Whatever the library raises as a ValueError of one line.

    What a panic prints to standard error is kept back.
    """
    try:
        with _no_stderr():
            yield
    except BaseException as error:
        # Plain exceptions, and panics, which Python cannot name to catch.
        if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
            raise
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(f"{where} ({reason}){then}") from None


_STDERR = threading.Lock()  # two at once could leave it closed


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Standard error to nowhere: the file itself, as a panic does not ask Python."""
    with _STDERR:
        sys.stderr.flush()
        kept = os.dup(2)
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _growth(parts: Any) -> float:
    """The product of what every replacement may do, at most."""
    growth, waiting = 1.0, [parts]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get("type") in ("Replace", "Prepend"):
                content = str(part.get("content") or part.get("prepend") or "")
                growth *= max(1, len(content.encode()))
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return growth
