"""Values as JSON data and as words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from personalpeft.deprecation import former_names


def to_json(value: Any) -> Any:
    """Return ``value`` as data that JSON can hold, at every depth.

    Dataclasses become objects of their fields, with the properties named in their class's
    ``json_properties``, and renamed attributes under both names. Datetimes become ISO 8601 text,
    enums their values, paths text. Tuples become lists, and sets sorted lists.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += getattr(value, "json_properties", ())
        data = {name: to_json(getattr(value, name)) for name in names}
        return data | {old: data[new] for old, new in former_names(type(value)).items()}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(to_json, value))
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


class HasJson:
    """A dataclass with ``as_json``."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """Return the value as data that JSON can hold: what all faces show."""
        data: dict[str, Any] = to_json(self)
        return data


def pluralize(number: int, singular: str, plural: str = "") -> str:
    """Return such as "1 turn" or "2,000 turns". ``plural`` is for a word that takes no s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"
