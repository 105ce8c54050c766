"""The JSON item of a step: what it is, and the digests that prove it whole."""

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from typing import Any

from bitmamba.io import digests

FORMAT = 1
MAX_BYTES = 64 * 2**20
ITEMS = ("trainable", "opt_state")
_DIGEST = re.compile(r"[A-Za-z0-9_<>]{1,40}\[[0-9,]{0,200}\]:[0-9a-f]{64}")
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def make_meta(
    *,
    step: int,
    config: Mapping[str, Any],
    fingerprints: Mapping[str, Any],
    leaf_digests: Mapping[str, Mapping[str, str]],
    frozen_digests: Mapping[str, str],
    frozen_source: str | None = None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The `meta` item: plain JSON that carries its own digest.

    Args:
        step: optimiser updates done.
        config: the resolved configuration.
        fingerprints: of data files, tokenizer, template, plan, model, optimiser.
        leaf_digests: per item ("trainable", "opt_state") the digest of each leaf.
        frozen_digests: of the frozen parameters; empty when nothing is frozen.
        frozen_source: where they were taken from, if they are not saved here.
        extra: run counters of the caller, as `bad_steps`.

    Raises:
        ValueError: something in it is not JSON (or not finite).
    """
    here = bool(frozen_digests) and frozen_source is None
    meta = {
        "format": FORMAT,
        "step": step,
        "config": config,
        "fingerprints": fingerprints,
        "digests": leaf_digests,
        "frozen": {
            "folder": frozen_folder(frozen_digests) if here else None,
            "source": frozen_source,
            "digests": frozen_digests,
        },
        "versions": versions(),
        "extra": extra,
    }
    try:
        meta = json.loads(json.dumps(meta, allow_nan=True, default=_plain))
    except TypeError as error:
        raise ValueError(f"checkpoint meta: {error}; expected JSON values") from None
    return {**meta, "digest": _own_digest(meta)}


def verified(meta: dict[str, Any]) -> dict[str, Any]:
    """A `meta` item as read from disk, without its own digest, which must match.

    Raises:
        ValueError: it does not match, or is not what `make_meta` makes: anybody can
            write a digest that matches.
        NotImplementedError: it is of a newer format.
    """
    if not isinstance(meta, dict):
        raise ValueError("not an object")
    body = {key: value for key, value in meta.items() if key != "digest"}
    if meta.get("digest") != _own_digest(body):
        raise ValueError("digest differs from the one saved")
    if not _is_count(body.get("format")):
        raise ValueError("no format")
    if body["format"] > FORMAT:
        raise NotImplementedError(
            f"checkpoint meta: got format {body['format']}; expected at most {FORMAT}; "
            "a newer version wrote it, update this one"
        )
    _check(body)
    return body


def _check(body: dict[str, Any]) -> None:
    """Names in it become folders and paths of parameters; none may be another."""
    kinds = {"config": dict, "fingerprints": dict, "digests": dict, "frozen": dict}
    kinds |= {"versions": dict, "extra": dict}
    wrong = [name for name, kind in kinds.items() if type(body.get(name)) is not kind]
    if wrong or not _is_count(body.get("step")):
        raise ValueError(f"no usable {wrong[0] if wrong else 'step'}")
    if set(body["digests"]) != set(ITEMS):
        raise ValueError(f"digests of other items than {', '.join(ITEMS)}")
    frozen = body["frozen"]
    if "folder" not in frozen:
        raise ValueError("no folder of the frozen parameters, not even null")
    tables = {**body["digests"], "frozen": frozen.get("digests")}
    for item, table in tables.items():
        if not isinstance(table, dict) or not all(
            isinstance(d, str) and _DIGEST.fullmatch(d) for d in table.values()
        ):
            raise ValueError(f"digests of {item}: expected dtype[shape]:sha256")
    source, folder = frozen.get("source"), frozen["folder"]
    if folder is not None and folder != frozen_folder(tables["frozen"]):
        raise ValueError("the folder of the frozen parameters is another's")
    if source is not None and not (isinstance(source, str) and folder is None):
        raise ValueError("the source of the frozen parameters is no path")
    _check_tree({**tables["trainable"], **tables["frozen"]})


def _check_tree(table: Mapping[str, str]) -> None:
    """Paths of parameters make a tree: none is a part of another."""
    for path in table:
        parts = path.split("/")
        above = ("/".join(parts[:n]) for n in range(1, len(parts)))
        if "" in parts or any(p in table for p in above):
            raise ValueError(f"{path[:200]!r} is no path of a parameter")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def frozen_folder(frozen_digests: Mapping[str, str]) -> str:
    """Name of the folder that holds frozen parameters with these digests."""
    return f"frozen-{digests.combined(frozen_digests)[:16]}"


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the numbers."""
    found = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **found}


def _own_digest(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """numpy and jax scalars as Python numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} is not JSON")
