"""Long texts in pieces of which the tokens are those of the whole.

The tokenizers library takes some 230 bytes a token while it encodes: 3.4 GiB for 15 MiB
of which each byte is one. Most tokenizers first split a text by a regular expression
and look at nothing across such a boundary, so it may be cut there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

PIECE = 2**17  # characters, then cut at the next place
MOST = 2**19  # characters without a place
MOST_WHOLE = 4 * 2**20  # UTF-8 bytes, if nothing is known of places

# Before a space that follows anything but whitespace; and, as some write without
# spaces, after a letter or a digit before a line feed or a mark of punctuation. None of
# the expressions below matches across it, or looks back from behind it; and what is no
# whitespace at the end is not what their lookahead, `\s+(?!\S)`, asks about.
_LETTERS = "A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_PLACE = re.compile(f"\\S |[{_LETTERS}][\n.,;:!?\u3001\u3002\uff0c]")

_REST = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
# Beside GPT-2's, which the library has by itself: of Llama 3 and GPT-4, and of Qwen 2.
_PATTERNS = {_SHORT + _REST % "{1,3}", _SHORT + _REST % ""}


def can_be_cut(described: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is of a kind whose texts may be cut at such places."""
    normalizer = described.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    added = described.get("added_tokens") or []
    if any(t.get("lstrip") or t.get("rstrip") or t.get("single_word") for t in added):
        return False
    if any(_PLACE.search(t["content"]) for t in added):
        return False
    return _splits(described.get("pre_tokenizer") or {})


def _splits(pre_tokenizer: Mapping[str, Any]) -> bool:
    """GPT-2's splits, or those of a known expression and then bytes."""
    if pre_tokenizer.get("type") != "Sequence":
        return _is_bytes(pre_tokenizer, splits=True)
    parts = pre_tokenizer.get("pretokenizers") or []
    if len(parts) != 2 or not _is_bytes(parts[1], splits=False):
        return False
    split = parts[0]
    return (
        split.get("type") == "Split"
        and split.get("pattern", {}).get("Regex") in _PATTERNS
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
    )


def _is_bytes(part: Mapping[str, Any], *, splits: bool) -> bool:
    return (
        part.get("type") == "ByteLevel"
        and not part.get("add_prefix_space", True)
        and part.get("use_regex", True) == splits
    )


def pieces(text: str, *, cut: bool) -> Iterator[str]:
    """The text, in pieces if it is long.

    Args:
        cut: from `can_be_cut`.

    Raises:
        ValueError: it is long and cannot be cut.
    """
    at = 0
    while cut and len(text) - at > PIECE:
        place = _PLACE.search(text, at + PIECE, at + MOST)
        if place is None:
            break
        yield text[at : place.start() + 1]
        at = place.start() + 1
    rest = text[at:]
    if len(rest) > MOST:
        _check_whole(rest, at, cut=cut)
    yield rest


def _check_whole(rest: str, at: int, *, cut: bool) -> None:
    if cut:
        raise ValueError(
            f"{MOST:,} characters, from character {at + 1:,} on, without a place to "
            "cut the text (before a space; after a letter before a comma); split it"
        )
    n_bytes = len(rest.encode("utf-8", "replace"))
    if n_bytes > MOST_WHOLE:
        raise ValueError(
            f"a text of {n_bytes:,} bytes; this tokenizer takes at most "
            f"{MOST_WHOLE:,} at once; split it"
        )
