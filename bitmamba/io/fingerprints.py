"""What a run depends on, and the refusal to resume after it changed."""

from collections.abc import Mapping
from typing import Any

ANEW = (
    "restore it, or start a new run with another --config.workdir and "
    "--config.checkpoint.init_from"
)


def check_fingerprints(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: str = "checkpoint",
    advice: str = ANEW,
) -> None:
    """Refuse to resume when something the run depends on has changed.

    Args:
        saved: fingerprints in the checkpoint; values may be nested dicts, so that
            a single data file or field is named.
        now: fingerprints of this run, of the same form.
        where: named in the message, e.g. "checkpoint step 50".
        advice: end of the message.

    Raises:
        ValueError: one line that names every changed field with both values.
    """
    old, new = _flat(saved), _flat(now)
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    if not changed:
        return
    first = changed[0]
    more = f" (also changed: {', '.join(changed[1:])})" if changed[1:] else ""
    raise ValueError(
        f"{where}: {first} changed: got {_short(new.get(first))}; expected "
        f"{_short(old.get(first))} as saved{more}; {advice}"
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to {"data.train.jsonl": value}; lists as JSON stores them."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
