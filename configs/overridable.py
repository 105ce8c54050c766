"""Dataclasses as ConfigDicts in which flags can override every field."""

import dataclasses
import types
import typing
from typing import Any

import ml_collections
from ml_collections import config_dict


def as_config_dict(value: Any) -> ml_collections.ConfigDict:
    """A dataclass as a ConfigDict that flags can override, optional values too."""
    hints = typing.get_type_hints(type(value))
    settings = ml_collections.ConfigDict()
    for field in dataclasses.fields(value):
        item, hint = getattr(value, field.name), hints[field.name]
        if dataclasses.is_dataclass(item):
            item = as_config_dict(item)
        elif isinstance(hint, types.UnionType):
            item = _optional(item, hint)
        elif isinstance(item, tuple):
            item = tuple(
                dataclasses.asdict(i) if dataclasses.is_dataclass(i) else i
                for i in item
            )
        settings[field.name] = item
    return settings


def _optional(item: Any, hint: types.UnionType) -> config_dict.FieldReference:
    """A field that flags can set to a value; numbers also back to None."""
    field = config_dict.placeholder(str if str in typing.get_args(hint) else object)
    field.set(item)
    return field
