"""How frozen values become JSON, how JSON becomes frozen values, and the JSON Schema that says so: three readings of one type.

Invariants: what ``give`` makes of a value fits the schema of its type, and ``take`` makes the same value of it again; a strict
``take`` lets nothing through that the schema does not allow, and names what it refuses but never repeats a value.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from personalpeft.chat.reply import Reply
from personalpeft.errors import InvalidInput, PersonalPeftError, suggest_nearest
from personalpeft.learning.report import LearnReport, Source
from personalpeft.learning.status import SignalStatus
from personalpeft.types import Stack, ToolCall, Verdict

# What a value says of itself beside its fields. It is written and never read: whoever takes the value works it out again.
TOLD: Mapping[type, Mapping[str, type]] = {
    Stack: {"digest": str},
    Reply: {"tool_calls": tuple[ToolCall, ...]},
    LearnReport: {
        "live": bool,
        "verdict": Verdict,
        "reason": str,
        "dry_run": bool,
        "moved": bool,
        "event": str,
    },
    Source: {"use": str, "why": str},
    SignalStatus: {"use": str, "why": str, "pinned": bool},
}

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
_LONGEST_LIST = 10_000


@dataclass(frozen=True, slots=True)
class Text:
    """Of a text: how long it may be in characters, the pattern that all of it matches, and which error it is where it does not."""

    longest: int = 100_000
    shortest: int = 0
    pattern: str = ""
    otherwise: type[PersonalPeftError] = InvalidInput


@dataclass(frozen=True, slots=True)
class Range:
    """Of a number: from ``least`` (or more than ``above``) up to ``most``."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


@dataclass(frozen=True, slots=True)
class Many:
    """Of a list: how many there may be."""

    most: int = _LONGEST_LIST
    least: int = 0


def to_json(value: Any) -> Any:
    """A value as what JSON knows: fields as keys, with what it says of itself; moments in ISO 8601."""
    if is_dataclass(value) and not isinstance(value, type):
        told = TOLD.get(type(value), {})
        return {name: to_json(getattr(value, name)) for name in (*_hints(type(value)), *told)}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value.value if isinstance(value, Enum) else value


def from_json(kind: Any, value: Any, where: str = "The body", *, strict: bool = True) -> Any:
    """The value of a type that JSON stands for. Strict is for what a stranger sent: bounds are checked and keys that are not
    known refused. Otherwise they are left out, so that an older client reads a newer server. Raises ``InvalidInput``.
    """
    plain, bounds = _unwrapped(kind)
    if plain is Any:
        return value
    if _is_union(plain):
        return _read_union(get_args(plain), value, where, strict)
    if not _fits(plain, value):
        raise InvalidInput(f"{where} is {_what(value)}.", hint=f"Give {_wanted(plain)}.")
    if is_dataclass(plain):
        return _read_fields(cast(type, plain), value, where, strict)
    origin = get_origin(plain) or plain
    if origin is Literal:
        return next(each for each in get_args(plain) if each == value)
    if origin is tuple:
        return _read_list(plain, bounds, value, where, strict)
    if origin is Mapping:
        return {
            key: from_json(get_args(plain)[1], each, f"{where}: {key}", strict=strict)
            for key, each in value.items()
        }
    if isinstance(plain, type) and issubclass(plain, Enum):
        return plain(value)
    if plain is datetime:
        return datetime.fromisoformat(value)
    if strict:
        _check(plain, bounds, value, where)
    return int(value) if plain is int else float(value) if plain is float else value


def schemas(answers: Iterable[Any], bodies: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """The schema of every dataclass that these types lead to, by name. Of an answer every field is there; of what is sent, those
    that have no default must be.
    """
    sent, told = dict(_reached(bodies)), dict(_reached(answers))
    clash = [name for name in sent.keys() & told.keys() if sent[name] is not told[name]]
    if clash:
        raise TypeError(f"two types are called {clash[0]}")
    return {
        name: _schema_of_fields(kind, sent=name in sent)
        for name, kind in sorted({**told, **sent}.items())
    }


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type; a dataclass is named, not spelled out."""
    plain, bounds = _unwrapped(kind)
    origin, arguments = get_origin(plain) or plain, get_args(plain)
    if _is_union(plain):
        return {"anyOf": [schema_of(each) for each in arguments]}
    if is_dataclass(plain):
        return {"$ref": f"#/components/schemas/{cast(type, plain).__name__}"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        limits = (
            _only(minItems=bounds.least or None, maxItems=bounds.most)
            if isinstance(bounds, Many)
            else {}
        )
        return {"type": "array", "items": schema_of(arguments[0]), **limits}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(arguments[1]) or True}
    if isinstance(plain, type) and issubclass(plain, Enum):
        return {"type": "string", "enum": [each.value for each in plain]}
    if plain is str:
        return {"type": "string", **(_text_limits(bounds) if isinstance(bounds, Text) else {})}
    if plain in (int, float):
        kind_name = "integer" if plain is int else "number"
        limits = (
            _only(minimum=bounds.least, maximum=bounds.most, exclusiveMinimum=bounds.above)
            if isinstance(bounds, Range)
            else {}
        )
        return {"type": kind_name, **limits}
    return dict(_SCHEMAS[plain])


def unions(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    plain, _ = _unwrapped(kind)
    return get_args(plain) if _is_union(plain) else (kind,)


def fields_of(kind: type) -> Iterator[tuple[str, Any, bool, Any]]:
    """Of each field: its name, its type with its bounds, whether it must be given, and what it is where it is not."""
    hints = _hints(kind)
    for each in fields(kind):
        needed = _needed(each)
        yield each.name, hints[each.name], needed, None if needed else _default(each)


_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    Any: {},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
}


def _read_union(kinds: Sequence[Any], value: Any, where: str, strict: bool) -> Any:
    fitting = [kind for kind in kinds if _fits(_unwrapped(kind)[0], value)]
    others = [kind for kind in kinds if kind is not types.NoneType]
    if fitting:
        return from_json(fitting[0], value, where, strict=strict)
    if len(others) == 1:
        return from_json(others[0], value, where, strict=strict)
    wanted = " or ".join(_wanted(_unwrapped(kind)[0]) for kind in others)
    raise InvalidInput(f"{where} is {_what(value)}.", hint=f"Give {wanted}.")


def _read_fields(kind: type, value: Mapping[str, Any], where: str, strict: bool) -> Any:
    hints = _hints(kind)
    if strict and (unknown := sorted(value.keys() - hints.keys())):
        raise InvalidInput(
            f"{where} has {ascii(unknown[0])[:80]}, which is not known.",
            hint=suggest_nearest(unknown[0], hints, what="key"),
        )
    missing = [each.name for each in fields(kind) if _needed(each) and each.name not in value]
    if missing:
        raise InvalidInput(
            f"{where} has no {missing[0]}.",
            hint=f"Give {_wanted(_unwrapped(hints[missing[0]])[0])}.",
        )
    given = {
        name: from_json(hint, value[name], _at(where, name), strict=strict)
        for name, hint in hints.items()
        if name in value
    }
    return kind(**given)


def _read_list(
    kind: Any, bounds: Any, value: Sequence[Any], where: str, strict: bool
) -> tuple[Any, ...]:
    limits = bounds if isinstance(bounds, Many) else Many()
    if strict and not limits.least <= len(value) <= limits.most:
        raise InvalidInput(
            f"{where} has {len(value)} entries.",
            hint=f"Give {limits.least} to {limits.most} of them.",
        )
    inner = get_args(kind)[0]
    return tuple(
        from_json(inner, each, f"{where}[{number}]", strict=strict)
        for number, each in enumerate(value)
    )


def _check(plain: Any, bounds: Any, value: Any, where: str) -> None:
    """Of a text, that it is one and keeps its bounds; of a number, that it does."""
    if plain is str:
        limits = bounds if isinstance(bounds, Text) else Text()
        if _NOT_TEXT.search(value):
            raise InvalidInput(
                f"{where} holds characters that are not text.", hint="Send plain text."
            )
        length = f"{limits.shortest} to {limits.longest} characters"
        if limits.pattern and (
            len(value) > limits.longest or re.fullmatch(limits.pattern, value) is None
        ):
            raise limits.otherwise(
                f"{where} is none that there can be.", hint=f"{length} that match {limits.pattern}"
            )
        if not limits.shortest <= len(value) <= limits.longest:
            raise InvalidInput(f"{where} has {len(value)} characters.", hint=f"Give {length}.")
    if plain in (int, float) and isinstance(bounds, Range):
        too_small = (bounds.least is not None and value < bounds.least) or (
            bounds.above is not None and value <= bounds.above
        )
        if too_small or (bounds.most is not None and value > bounds.most):
            raise InvalidInput(f"{where} is out of range.", hint=f"Give {_range(bounds)}.")


def _fits(plain: Any, value: Any) -> bool:
    """Whether JSON of this sort can stand for the type."""
    origin = get_origin(plain) or plain
    if plain is Any:
        return True
    if is_dataclass(plain) or origin is Mapping:
        return isinstance(value, Mapping)
    if origin is Literal:
        return any(
            each == value and isinstance(each, bool) == isinstance(value, bool)
            for each in get_args(plain)
        )
    if origin is tuple:
        return isinstance(value, list)
    if isinstance(plain, type) and issubclass(plain, Enum):
        return value in [each.value for each in plain]
    if plain is datetime:
        return isinstance(value, str) and _is_moment(value)
    if plain in (int, float):
        # 1.0 is a whole number in JSON, where there is only one sort of them.
        whole = isinstance(value, int) or (
            isinstance(value, float) and (plain is float or value.is_integer())
        )
        return whole and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    return isinstance(value, plain)


def _is_moment(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _unwrapped(kind: Any) -> tuple[Any, Any]:
    if get_origin(kind) is Annotated:
        plain, bounds, *_ = get_args(kind)
        return plain, bounds
    return (types.NoneType if kind is None else kind), None


def _is_union(plain: Any) -> bool:
    return get_origin(plain) in (Union, types.UnionType)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def _needed(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _schema_of_fields(kind: type, *, sent: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, hint, needed, default in fields_of(kind):
        properties[name] = schema_of(hint)
        if sent and not needed and default is not None and not properties[name].get("$ref"):
            properties[name]["default"] = to_json(default)
    told = (
        {}
        if sent
        else {
            name: {**schema_of(hint), "readOnly": True} for name, hint in TOLD.get(kind, {}).items()
        }
    )
    required = [name for name, _, needed, _ in fields_of(kind) if needed or not sent]
    return {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").split()),
        "properties": {**properties, **told},
        **({"required": [*required, *told]} if required or told else {}),
        "additionalProperties": False,
    }


def _reached(kinds: Iterable[Any]) -> Iterator[tuple[str, type]]:
    """Every dataclass that is one of these types or inside one, by name, once."""
    waiting, seen = list(kinds), set[type]()
    while waiting:
        plain, _ = _unwrapped(waiting.pop())
        if is_dataclass(plain):
            kind = cast(type, plain)
            if kind not in seen:
                seen.add(kind)
                waiting += _hints(kind).values()
                yield kind.__name__, kind
        else:
            waiting += [
                each
                for each in get_args(plain)
                if each is not Ellipsis and get_origin(plain) is not Literal
            ]


def _text_limits(bounds: Text) -> dict[str, Any]:
    return _only(
        minLength=bounds.shortest or None,
        maxLength=bounds.longest,
        pattern=f"^(?:{bounds.pattern})$" if bounds.pattern else None,
    )


def _only(**given: Any) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _at(where: str, name: str) -> str:
    return name if where == "The body" else f"{where}: {name}"


def _range(bounds: Range) -> str:
    low = f"more than {bounds.above:g}" if bounds.above is not None else None
    low = low or (f"at least {bounds.least:g}" if bounds.least is not None else None)
    return " and ".join(
        each
        for each in (low, f"at most {bounds.most:g}" if bounds.most is not None else None)
        if each
    )


def _what(value: Any) -> str:
    for kind, name in _NAMES.items():
        if isinstance(value, kind):
            return (
                f"{name}, which it cannot be"
                if kind is not types.NoneType
                else "null, which it cannot be"
            )
    return "of no known kind"


def _wanted(plain: Any) -> str:
    origin = get_origin(plain) or plain
    if _is_union(plain):
        return " or ".join(_wanted(_unwrapped(each)[0]) for each in get_args(plain))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(plain)))}"
    if isinstance(plain, type) and issubclass(plain, Enum):
        return f"one of {', '.join(str(each.value) for each in plain)}"
    if is_dataclass(plain) or origin is Mapping:
        return "an object"
    if plain is datetime:
        return "a moment in ISO 8601"
    return {tuple: "a list", int: "a whole number", types.NoneType: "null"}.get(
        origin
    ) or _NAMES.get(origin, "a value")


_NAMES: Mapping[type, str] = {
    types.NoneType: "null",
    bool: "true or false",
    str: "text",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
