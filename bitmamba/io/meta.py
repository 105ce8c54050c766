"""The JSON item of a step: what it is, and the digests that prove it whole."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

from bitmamba.io import digests

FORMAT = 1
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
        ValueError: it does not match.
        NotImplementedError: it is of a newer format.
    """
    body = {key: value for key, value in meta.items() if key != "digest"}
    if meta.get("digest") != _own_digest(body):
        raise ValueError("digest differs from the one saved")
    if body["format"] > FORMAT:
        raise NotImplementedError(
            f"checkpoint meta: got format {body['format']}; expected at most {FORMAT}; "
            "a newer version wrote it, update this one"
        )
    return body


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
