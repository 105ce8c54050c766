"""The formats of rows; a row is recognised by its keys, the first match wins.

A format knows nothing of tokenizers: `parse(row)` gives an `Example` or refuses.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from bitmamba.data.example import Example, Refused
from bitmamba.data.formats import chat, hybrid, pairs, tokens
from bitmamba.data.records import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    checked_text,
    is_weight,
    number_field,
    text_field,
)


class Format(NamedTuple):
    """Rows with all of these keys are read by `parse`."""

    keys: tuple[str, ...]
    parse: Callable[[dict[str, Any]], Example]


def parse_text(row: dict[str, Any]) -> Example:
    """Plain text, every token trained."""
    return Example(text=text_field(row, "text"))


FORMATS: dict[str, Format] = {
    "messages": Format(("messages",), chat.parse_messages),
    "sharegpt": Format(("conversations",), chat.parse_sharegpt),
    "tokens": Format(("input_ids",), tokens.parse),
    "hybrid": Format(("prompt", "answer"), hybrid.parse),
    "scored": Format(("prompt", "teacher_response", "score"), pairs.parse_teacher),
    "teacher": Format(("prompt", "teacher_response"), pairs.parse_teacher),
    "completion": Format(("prompt", "completion"), pairs.parse_completion),
    "alpaca": Format(("instruction", "output"), pairs.parse_alpaca),
    "text": Format(("text",), parse_text),
}


# Keys of a row that a format, or every format, may have besides.
_OPTIONAL = ("category", "weight", "system", "thought", "score", "input")
_OPTIONAL += ("loss_mask", "labels")
KNOWN_KEYS = tuple(
    dict.fromkeys([k for f in FORMATS.values() for k in f.keys] + [*_OPTIONAL])
)
_MAX_KEYS, _MAX_KEY_CHARS = 50, 40  # looked at; a row of a person has few


def misspelt(row: Iterable[str]) -> list[tuple[str, str]]:
    """Keys that nothing reads and that are near a known one which the row has not."""
    found = []
    for key in itertools.islice(row, _MAX_KEYS):
        if key in KNOWN_KEYS or len(key) > _MAX_KEY_CHARS:
            continue
        near = difflib.get_close_matches(key.lower(), KNOWN_KEYS, n=1, cutoff=0.75)
        if near and near[0] not in row:
            found.append((key, near[0]))
    return found


def parse_row(row: dict[str, Any], *, role: str = "sft") -> tuple[str, Example]:
    """Recognise a row and read it.

    Args:
        row: of JSON.
        role: "sft", "replay" or "heldout_replay". A `score` is read of SFT rows only:
            corpora of text have keys of that name for things of their own.

    Returns:
        The name of the format, and the example with category, weight and score.

    Raises:
        Refused: no known format, or something in the row is not usable.
    """
    for name, known in FORMATS.items():
        if all(key in row for key in known.keys):
            example = _with_common_fields(row, known.parse(row))
            if role == "sft" and "score" in row:
                example = replace(example, score=number_field(row, "score"))
            return name, example
    keys = ", ".join(sorted(map(str, row)))[:80] or "none"
    known = " | ".join("+".join(f.keys) for f in FORMATS.values())
    hint = "".join(f"; did you mean {near!r}?" for _, near in misspelt(row)[:2])
    raise Refused("unknown format", f"keys: {keys}{hint}; expected {known}")


def _with_common_fields(row: dict[str, Any], example: Example) -> Example:
    category, weight = None, 1.0
    if "category" in row:
        category = checked_text(row["category"], "'category'").strip()
        if not category.isprintable() or len(category) > 80:
            raise Refused("not a category", f"{category[:80]!r}; expected a short name")
        if category == "replay":
            raise Refused("reserved category", "'replay' is the replay text's own")
    if "weight" in row:
        weight = number_field(row, "weight")
        if weight == 0:
            raise Refused("weight 0", "nothing would be learnt from it")
        if not is_weight(weight):
            expected = f"expected {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            raise Refused("not a weight", f"'weight' is {weight:g}; {expected}")
    return replace(example, category=category, weight=weight)
