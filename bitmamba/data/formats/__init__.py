"""The formats of rows; a row is recognised by its keys, the first match wins.

A format knows nothing of tokenizers: `parse(row)` gives an `Example` or refuses.
"""

from collections.abc import Callable
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
    "scored": Format(("prompt", "teacher_response", "score"), pairs.parse_scored),
    "teacher": Format(("prompt", "teacher_response"), pairs.parse_teacher),
    "completion": Format(("prompt", "completion"), pairs.parse_completion),
    "alpaca": Format(("instruction", "output"), pairs.parse_alpaca),
    "text": Format(("text",), parse_text),
}


def parse_row(row: dict[str, Any]) -> tuple[str, Example]:
    """Recognise a row and read it.

    Returns:
        The name of the format, and the example with category and weight.

    Raises:
        Refused: no known format, or something in the row is not usable.
    """
    for name, known in FORMATS.items():
        if all(key in row for key in known.keys):
            return name, _with_common_fields(row, known.parse(row))
    keys = ", ".join(sorted(map(str, row)))[:80] or "none"
    known = " | ".join("+".join(f.keys) for f in FORMATS.values())
    raise Refused("unknown format", f"keys: {keys}; expected {known}")


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
