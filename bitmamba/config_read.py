"""Turns what the user typed (a ConfigDict) or a run saved (JSON) into a `Config`.

Unknown keys, wrong types, values out of range and impossible combinations end here,
before JAX starts, as a ValueError of one line.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitmamba.config import LAYER_SYMBOLS, Config
from bitmamba.config_checks import check


def from_config_dict(config: Any) -> Config:
    """Resolve and check a ConfigDict (or any nested mapping).

    Returns:
        The frozen `Config`; layers are resolved to mixer names.

    Raises:
        ValueError: unknown key (with the nearest known one), wrong type, value out
            of range, combination that cannot work.
    """
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    _expand_layers(values)
    _split_lists(values)
    resolved = _build(Config, values, "config")
    check(resolved)
    return resolved


def to_json(config: Config) -> dict[str, Any]:
    """Plain data that `from_config_dict` reads back to an equal Config."""
    return _plain(dataclasses.asdict(config))


def write_json(config: Config, path: Path) -> None:
    """Write the resolved configuration for people and for later runs.

    Raises:
        ValueError: the file is a link, which would be written through.
    """
    if path.is_symlink():
        raise ValueError(f"{path}: a link; expected a file of this run; remove it")
    path.write_text(json.dumps(to_json(config), indent=2) + "\n")


def _plain(value: Any) -> Any:
    """Tuples to lists and infinity to "inf", which JSON has no number for."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return "inf" if value == math.inf else value


def _expand_layers(values: dict[str, Any]) -> None:
    """ "MM*-" or ["mamba2", ...] to a tuple of names, in place."""
    model = values.get("model")
    if not isinstance(model, Mapping) or "layers" not in model:
        return
    layers = model["layers"]
    if isinstance(layers, str):
        unknown = sorted(set(layers) - set(LAYER_SYMBOLS))
        if unknown:
            known = ", ".join(f"{k} = {v}" for k, v in LAYER_SYMBOLS.items())
            raise ValueError(
                f"config.model.layers: unknown symbol {unknown[0]!r} in {layers!r}; "
                f"expected {known}"
            )
        layers = [LAYER_SYMBOLS[symbol] for symbol in layers]
    elif not isinstance(layers, list | tuple):
        raise _wrong(layers, 'a list of names, or "MM*-"', "config.model.layers")
    values["model"] = {**model, "layers": tuple(layers)}


_LISTS = {
    "data": ("sft", "replay", "heldout_replay"),
    "lora": ("place", "train"),
}


def _split_lists(values: dict[str, Any]) -> None:
    """--config.data.sft=a.jsonl,b.jsonl arrives as ("a.jsonl,b.jsonl",); in place."""
    for part, keys in _LISTS.items():
        group = values.get(part)
        if not isinstance(group, Mapping):
            continue
        lists = {key: group[key] for key in keys if key in group}
        values[part] = {
            **group,
            **{
                key: tuple(one for item in items for one in item.split(",") if one)
                for key, items in lists.items()
                if isinstance(items, list | tuple)
                and all(isinstance(item, str) for item in items)
            },
        }


def _build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """One dataclass from one mapping, recursively."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise ValueError(f"{where}.{key}: unknown setting{_hint(key, fields)}")
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}.{missing[0]}: missing; expected a value")
    made = {k: _convert(v, hints[k], f"{where}.{k}") for k, v in values.items()}
    return cls(**made)


def _hint(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; expected one of {', '.join(known)}"


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check one value against its annotation; ints are accepted as floats."""
    if isinstance(hint, types.UnionType):
        if value in (None, "", "none", "None"):  # flags can only type text
            return None
        (hint,) = [h for h in typing.get_args(hint) if h is not type(None)]
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise _wrong(value, "a group of settings", where)
        return _build(hint, value, where)
    if typing.get_origin(hint) is tuple:
        return _convert_tuple(value, typing.get_args(hint), where)
    if hint is float:
        return _convert_float(value, where)
    # bool is an int in Python, but not to a user.
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _wrong(value, f"{hint.__name__}", where)
    return value


def _convert_float(value: Any, where: str) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, "a number", where)
    if value != value:
        raise _wrong(value, "a number that is not nan", where)
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        raise ValueError(
            f"{where}: got a whole number of {value.bit_length()} bits; expected a "
            "number that a float holds"
        ) from None


def _convert_tuple(value: Any, args: tuple, where: str) -> tuple:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise _wrong(value, "a list", where)
    if args[-1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(value) != len(args):
        raise _wrong(value, f"{len(args)} values", where)
    return tuple(
        _convert(v, a, f"{where}[{i}]")
        for i, (v, a) in enumerate(zip(value, args, strict=True))
    )


def _wrong(value: Any, expected: str, where: str) -> ValueError:
    return ValueError(f"{where}: got {value!r}; expected {expected}")
