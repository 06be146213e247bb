"""Conversion between values and rows: the only place that knows the columns of the chained tables.

Times are ISO 8601 text in UTC with microseconds, so that they sort. JSON is canonical text, so that
equal values have equal digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any, Literal, TypeAlias, get_args

from personalpeft import former_names
from personalpeft.errors import Damaged, InvalidInput
from personalpeft.store.database import Row
from personalpeft.store.types import UserSummary
from personalpeft.types import (
    TRAINS,
    HeadMove,
    Layer,
    Message,
    Revision,
    Sampling,
    Signal,
    SignalKind,
    Stack,
    StackEntry,
    Turn,
    Usage,
    Verdict,
    canonical_json,
    default_scope,
)

EntryKind: TypeAlias = Literal[
    "turn", "signal", "retraction", "revision", "judgement", "report", "move"
]

TOMBSTONE = "tombstone"
"""The table of what replaces an erased entry's content: its kind, its id and the time."""

_MAX_DEPTH = 64


class Column(Enum):
    """How a column stores its value."""

    TEXT = auto()
    OPTIONAL_TEXT = auto()
    TIME = auto()
    JSON = auto()
    COUNT = auto()
    REAL = auto()


_T, _O, _J = Column.TEXT, Column.OPTIONAL_TEXT, Column.JSON

COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "turn": {
        "id": _T,
        "at": Column.TIME,
        "messages": _J,
        "reply": _T,
        "stack": _J,
        "sampling": _J,
        "prompt_tokens": Column.COUNT,
        "completion_tokens": Column.COUNT,
        "finish_reason": _T,
        "used": _J,
        "conversation": _O,
        "previous": _O,
        "backend": _O,
        "backend_reason": _O,
    },
    "signal": {
        "id": _T,
        "kind": _T,
        "at": Column.TIME,
        "payload": _J,
        "turn": _O,
        "source": _T,
        "supersedes": _O,
    },
    "retraction": {"signal": _T, "at": Column.TIME, "purpose": _O},
    "revision": {
        "id": _T,
        "layer": _T,
        "digest": _T,
        "base": _T,
        "parent": _O,
        "below": _J,
        "recipe": _J,
        "inputs": _T,
        "at": Column.TIME,
        "seconds": Column.REAL,
    },
    "judgement": {
        "revision": _T,
        "verdict": _T,
        "reason": _T,
        "probation": Column.COUNT,
        "scores": _J,
        "signals": _J,
        "at": Column.TIME,
    },
    "report": {"revision": _O, "at": Column.TIME, "body": _J},
    "move": {"layer": _T, "before": _O, "after": _O, "cause": _T, "at": Column.TIME},
    TOMBSTONE: {"kind": _T, "id": _O, "at": Column.TIME},
}
"""The columns of each chained table, without ``user`` and ``seq``. Digests cover these names: never
rename one, and add a column only as nullable.
"""

KINDS: tuple[EntryKind, ...] = get_args(EntryKind)
"""In this order no row comes before one that it refers to."""


def encode(table: str, source: object = None, **values: Any) -> Row:
    """Return a row of a chained table, from these values and else from attributes of ``source``.

    Raises ``InvalidInput`` for a value that cannot be stored.
    """
    row = {}
    for name, column in COLUMNS[table].items():
        value = values.get(name) if name in values or source is None else getattr(source, name)
        row[name] = _encode_value(value, column, f"{table}'s {name}")
    return row


def decode(table: str, row: Row) -> dict[str, Any]:
    """Return the values of a row. Raises ``Damaged`` if a column does not hold JSON."""
    values = {}
    for name, column in COLUMNS[table].items():
        # A home of an earlier version that is open for reading has no column for it.
        value: Any = row.get(name) if column is Column.OPTIONAL_TEXT else row[name]
        if column is Column.JSON:
            value = from_json(value)
        elif column is Column.TIME:
            value = parse_time(value)
        values[name] = value
    return values


def encode_turn(turn: Turn) -> Row:
    """Return a turn's row."""
    return encode(
        "turn",
        turn,
        messages=[message.to_list() for message in turn.messages],
        stack={"base": turn.stack.base, "entries": encode_entries(turn.stack.entries)},
        # Older versions read rows without it.
        sampling={name: v for name, v in asdict(turn.sampling).items() if name != "top_k" or v},
        conversation=turn.conversation_id or "",
        **asdict(turn.usage),
    )


def decode_turn(row: Row) -> Turn:
    """Return the turn of a row."""
    values = decode("turn", row)
    stack, sampling = values["stack"], values["sampling"]
    return Turn(
        id=values["id"],
        user=row["user"],
        at=values["at"],
        messages=tuple(map(Message.from_list, values["messages"])),
        reply=values["reply"],
        stack=Stack(stack["base"], tuple(StackEntry(*entry) for entry in stack["entries"])),
        sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}),
        usage=Usage(values["prompt_tokens"], values["completion_tokens"]),
        finish_reason=values["finish_reason"],
        used=tuple(values["used"]),
        conversation_id=values["conversation"] or None,
        previous=values["previous"],
        backend=values["backend"],
        backend_reason=values["backend_reason"],
    )


def decode_signal(row: Row) -> Signal:
    """Return the signal of a row, which may say that its training was retracted."""
    values = decode("signal", row)
    if row.get("is_training_retracted"):
        values["payload"] = {**values["payload"], TRAINS: False}
    return Signal(**{**values, "user": row["user"], "kind": SignalKind(values["kind"])})


def decode_revision(row: Row) -> Revision:
    """Return the revision of a row that joins its newest judgement, and its signals by role."""
    values = decode("revision", row)
    return Revision(
        **{
            **values,
            "user": row["user"],
            "below": tuple(StackEntry(*entry) for entry in values["below"]),
            "recipe": former_names.rename_recipe(values["recipe"]),
            "signals": decode_roles(row["signals"]),
            "scores": former_names.rename_scores(from_json(row["scores"])),
            "verdict": Verdict(row["verdict"]),
            "reason": row["reason"],
            "probation": bool(row["probation"]),
        }
    )


def decode_move(row: Row) -> HeadMove:
    """Return the head move of a row."""
    values = decode("move", row)
    cause = former_names.MOVE_CAUSES.get(values["cause"], values["cause"])
    return HeadMove(**{**values, "user": row["user"], "cause": cause})


def decode_roles(text: str) -> dict[str, str]:
    """Return the role of each signal, from the JSON of a judgement or of the provenance."""
    return {signal: former_names.ROLES.get(role, role) for signal, role in from_json(text).items()}


def decode_report(text: str) -> dict[str, Any]:
    """Return a stored report."""
    return former_names.rename_report(from_json(text))


def decode_layer(row: Row, position: int) -> Layer:
    """Return the layer of a row, at its position among its user's layers."""
    # A home of an earlier version that is open for reading has no column for the scope.
    scope = row.get("scope") or default_scope(row["name"])
    return Layer(row["name"], position, row["head"], row["weight"], scope)


def decode_summary(row: Row) -> UserSummary:
    """Return the summary of a row."""
    return UserSummary(
        row["id"],
        parse_time(row["since"]),
        row["turns"],
        row["signals"],
        row["revisions"],
        training=bool(row.get("trains", True)),
    )


def encode_entries(entries: tuple[StackEntry, ...]) -> list[list[Any]]:
    """Return stack entries as JSON."""
    return [[e.layer, e.revision, e.digest, e.weight] for e in entries]


def format_time(at: datetime) -> str:
    """Return a moment as stored.

    Raises ``ValueError`` if it has no time zone: a bug of the caller.
    """
    if at.tzinfo is None:
        raise ValueError("a moment must have a time zone")
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Return the moment of stored text."""
    return datetime.fromisoformat(text)


def to_json(value: Any, *, what: str) -> str:
    """Return canonical JSON.

    Raises ``InvalidInput`` for what JSON cannot hold: NaN, bytes, lone surrogates, deep nesting.
    """
    if isinstance(value, Mapping):
        value = dict(value)
    if not _is_shallow(value, _MAX_DEPTH):
        raise InvalidInput(
            f"The {what} must be nested at most {_MAX_DEPTH} deep.", hint="Send a flatter value."
        )
    try:
        text = canonical_json(value)
        text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"The {what} cannot be written as JSON: {error}.",
            hint="Use texts in valid Unicode, finite numbers, booleans, null, lists and mappings "
            "with text keys.",
        ) from error
    return text


def from_json(text: str) -> Any:
    """Return the value of stored JSON.

    Raises ``Damaged`` if the text was changed by another program.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise Damaged(
            f"The database holds {text[:40]!a} where JSON should be.",
            hint="Run verify to see what was changed.",
        ) from error


def _encode_value(value: Any, column: Column, what: str) -> Any:
    match column:
        case Column.TIME:
            return format_time(value)
        case Column.JSON:
            return to_json(value, what=what)
        case Column.REAL:
            return float(value)
        case Column.COUNT:
            return int(value)
    return value


def _is_shallow(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        return levels > 0 and all(_is_shallow(inner, levels - 1) for inner in value.values())
    if isinstance(value, list | tuple):
        return levels > 0 and all(_is_shallow(inner, levels - 1) for inner in value)
    return True
