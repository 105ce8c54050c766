"""Trees as "a/b/c" paths, first-match rules over them, and the coverage check."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import traverse_util


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts to {"a/b/c": leaf}, in sorted order of the paths."""
    flat = traverse_util.flatten_dict(tree, sep="/")
    return dict(sorted(flat.items()))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")


def first_match(path: str, patterns: Sequence[str]) -> int | None:
    """Index of the first pattern that matches the whole path, or None."""
    for index, pattern in enumerate(patterns):
        if re.fullmatch(pattern, path):
            return index
    return None


def must_match(pattern: str, paths: Iterable[str], *, where: str) -> None:
    """Raise ValueError, naming the nearest path, when a pattern matches none."""
    paths = list(paths)
    if any(re.fullmatch(pattern, path) for path in paths):
        return
    near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
    hint = f"; nearest parameter: {near[0]!r}" if near else ""
    raise ValueError(
        f"{where}: pattern {pattern!r} matches no parameter{hint}; correct or remove it"
    )


def assign(paths: Iterable[str], patterns: Sequence[str], *, where: str) -> list[int]:
    """Match every path to its first rule; each path and each rule must be used.

    Args:
        paths: parameter paths.
        patterns: regular expressions, matched against the whole path.
        where: name of the rule list, for messages, e.g. "optim.rules".

    Returns:
        For each path the index of its rule.

    Raises:
        ValueError: a path without a rule, or a rule that decides nothing.
    """
    paths = list(paths)
    chosen = [first_match(path, patterns) for path in paths]
    homeless = [p for p, c in zip(paths, chosen, strict=True) if c is None]
    if homeless:
        raise ValueError(
            f"{where}: {len(homeless)} parameters match no rule, e.g. "
            f"{homeless[0]!r}; expected every parameter covered; add a last rule '.*'"
        )
    for index, pattern in enumerate(patterns):
        if index not in chosen:
            near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
            hint = f"; nearest parameter: {near[0]!r}" if near else ""
            raise ValueError(
                f"{where}[{index}]: pattern {pattern!r} decides for no parameter "
                f"(nothing matches, or an earlier rule takes all){hint}; "
                "correct or remove it"
            )
    return [c for c in chosen if c is not None]


def split(
    tree: Mapping[str, Any], is_first: Callable[[str], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a tree of dicts into (those whose path satisfies is_first, the rest)."""
    flat = flatten(tree)
    first = {p: v for p, v in flat.items() if is_first(p)}
    rest = {p: v for p, v in flat.items() if not is_first(p)}
    return unflatten(first), unflatten(rest)


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Join two trees with disjoint paths; the inverse of `split`."""
    return unflatten({**flatten(first), **flatten(second)})
