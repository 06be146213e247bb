"""Resolve a typed id to one user, layer, turn, signal or revision.

Invariants: an exact id wins over a prefix, and a prefix over an ending. Both are accepted only if
they are unique. Every lookup and every hint reads a bounded number of rows, however many users
exist. An ending, which reports show, is looked for among the ids of one user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from personalpeft.errors import Forgotten, InvalidInput, NotFound, suggest_nearest
from personalpeft.store.database import fetch_all, fetch_one, has_table
from personalpeft.store.error_mapping import sqlite3

Table: TypeAlias = Literal["turn", "signal", "revision"]

_MAX_SHOWN = 8
_MAX_NEIGHBOURS = 200
# Ids begin with their time, so those of a day differ near the end.
_ENDING = re.compile(r"[0-9a-z]{4,40}")
_AFTER_ASCII = "\x7f"


def is_ending(text: str) -> bool:
    """Return whether a text may be the ending of a turn's or signal's id."""
    return _ENDING.fullmatch(text) is not None


def is_user(db: sqlite3.Connection, user: str) -> bool:
    """Return whether a user exists."""
    return user.isascii() and fetch_one(db, "select id from user where id = ?", user) is not None


def resolve_user(db: sqlite3.Connection, user: str) -> str:
    """Return the user's id. Raises ``NotFound`` with the nearest in the hint."""
    if is_user(db, user):
        return user
    near = _neighbours(db, "select id from user where id", user)
    raise NotFound(f"There is no user {user!a}.", hint=suggest_nearest(user, near, what="user"))


def resolve_layer(db: sqlite3.Connection, user: str, layer: str) -> str:
    """Return the layer's name. Raises ``NotFound`` with the nearest in the hint."""
    resolve_user(db, user)
    check_is_text(layer, "layer")
    names = _ids(db, "select name as id from layer where user = ?", user)
    if layer in names:
        return layer
    hint = "There is no layer yet; the first learn makes one."
    if names:
        hint = suggest_nearest(layer, names, what="layer")
    raise NotFound(f"{user} has no layer {layer!a}.", hint=hint)


def resolve_id(
    db: sqlite3.Connection, table: Table, user: str, prefix: str, *, layer: str | None = None
) -> str:
    """Return the full id of a turn, signal or revision of a user.

    Args:
        db: A connection in a transaction.
        table: What to look for.
        user: The owner.
        prefix: The id or a unique prefix of it; for a revision also a prefix of its digest. For a
            turn or a signal also a unique ending of four characters or more.
        layer: Considers only revisions of this layer.

    Raises:
        NotFound: No id fits; the hint names the nearest.
        Forgotten: It was erased.
        InvalidInput: Several ids fit; the message lists them.
    """
    resolve_user(db, user)
    check_is_text(prefix, f"id of a {table}")
    ids = _candidates(db, table, user, prefix, layer) if prefix and prefix.isascii() else []
    if not ids and table != "revision" and is_ending(prefix):
        select = f"select id from {table} where user = ? and id like ? order by id limit ?"
        ids = _ids(db, select, user, f"%{prefix}", _MAX_SHOWN + 1)
    if (found := choose_id(prefix, ids, table)) is not None:
        return found
    _check_tombstones(db, table, user, prefix)
    owner = f"{user}'s layer {layer}" if layer else user
    select = f"select id from {table} where user = ?3{' and layer = ?4' if layer else ''} and id"
    near = _neighbours(db, select, prefix, user, *([layer] if layer else []))
    raise NotFound(
        f"{owner} has no {table} {prefix[:80]!a}.",
        hint=suggest_nearest(prefix, near, what=table, newest_first=table != "revision"),
    )


def choose_id(prefix: str, ids: Sequence[str], what: str) -> str | None:
    """Return the one of some ids that is meant, or None if there is none.

    Args:
        prefix: What was typed.
        ids: Those that begin or end with it.
        what: What they are ids of.

    Raises:
        InvalidInput: Several fit, and none is equal; the message lists them.
    """
    if prefix in ids:
        return prefix
    if len(ids) > 1:
        shown = ", ".join(ids[:_MAX_SHOWN]) + (", …" if len(ids) > _MAX_SHOWN else "")
        raise InvalidInput(
            f"{prefix!r} fits more than one {what}: {shown}.", hint="Give more of the id."
        )
    return ids[0] if ids else None


def _candidates(
    db: sqlite3.Connection, table: Table, user: str, prefix: str, layer: str | None
) -> list[str]:
    layer_filter = "" if layer is None else " and layer = ?4"
    columns = ("id", "digest") if table == "revision" else ("id",)
    sql = " union ".join(
        f"select id from {table} where user = ?1 and {column} >= ?2 and {column} < ?3{layer_filter}"
        for column in columns
    )
    # Ids sort, so an exact id comes before all longer ones. The limit never cuts it off.
    sql += f" order by id limit {_MAX_SHOWN + 1}"
    return _ids(db, sql, user, prefix, prefix + _AFTER_ASCII, *([] if layer is None else [layer]))


def _check_tombstones(db: sqlite3.Connection, table: Table, user: str, prefix: str) -> None:
    """Raise ``Forgotten`` if the prefix fits one erased id."""
    if not (prefix and prefix.isascii() and has_table(db, "tombstone")):
        return
    sql = (
        "select id, at from tombstone where user = ? and id >= ? and id < ? and kind = ?"
        " order by id limit 2"
    )
    tombstones = fetch_all(db, sql, user, prefix, prefix + _AFTER_ASCII, table)
    ids = {tombstone["id"] for tombstone in tombstones}
    if len(ids) == 1 or prefix in ids:
        raise Forgotten(
            f"{tombstones[0]['id']} was forgotten on {tombstones[0]['at'][:10]}.",
            hint="This home holds nothing of it; an earlier backup may.",
        )


def _neighbours(db: sqlite3.Connection, select: str, text: str, *parameters: str) -> list[str]:
    """Return the ids nearest to ``text``. ``select`` must end with the column of the ids."""
    sql = (
        f"select id from ({select} >= ?1 order by id limit ?2)"
        f" union select id from ({select} < ?1 order by id desc limit ?2)"
    )
    return _ids(db, sql, text.encode("ascii", "replace").decode(), _MAX_NEIGHBOURS, *parameters)


def _ids(db: sqlite3.Connection, sql: str, *parameters: object) -> list[str]:
    return [row["id"] for row in fetch_all(db, sql, *parameters)]


def check_is_text(value: object, what: str) -> None:
    """Raise ``InvalidInput`` unless a value that is looked up is a string."""
    if not isinstance(value, str):
        raise InvalidInput(
            f"The {what} must be a string, got {value!a:.80}.", hint="Give a string."
        )
