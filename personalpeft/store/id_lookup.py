"""From what somebody typed to the one thing that is meant.

Invariants: an exact id wins over a prefix; a prefix is taken only when one thing bears it; every look-up, and every hint after one that
failed, touches a bounded number of rows, however many users there are.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import sqlite_utils

from personalpeft.errors import Forgotten, InvalidInput, NotFound, nearest
from personalpeft.store.database import Row, row, rows

Table: TypeAlias = Literal["turn", "signal", "revision"]

_SHOWN = 8
_NEIGHBOURS = 200
_AFTER_ASCII = "\x7f"


def known_user(db: sqlite_utils.Database, user: str) -> str:
    """The user's id. Raises ``NotFound`` naming the nearest."""
    if user.isascii() and row(db, "select id from user where id = ?", user):
        return user
    near = rows(
        db,
        "select id from (select id from user where id >= ?1 order by id limit ?2)"
        " union select id from (select id from user where id < ?1 order by id desc limit ?2)",
        _ascii(user),
        _NEIGHBOURS,
    )
    raise NotFound(
        f"There is no user {user!a}.",
        hint=nearest(user, [found["id"] for found in near], what="user"),
    )


def known_layer(db: sqlite_utils.Database, user: str, layer: str) -> str:
    """The layer's name. Raises ``NotFound`` naming the nearest of this user's layers."""
    known_user(db, user)
    _check_text(layer, "layer")
    names = [found["name"] for found in rows(db, "select name from layer where user = ?", user)]
    if layer in names:
        return layer
    raise NotFound(f"{user} has no layer {layer!a}.", hint=nearest(layer, names, what="layer"))


def known_id(
    db: sqlite_utils.Database, table: Table, user: str, wanted: str, *, layer: str | None = None
) -> str:
    """The full id of a turn, signal or revision of this user, from the id or an unambiguous prefix; of a revision also from a prefix of
    its digest. ``layer`` narrows revisions to one layer.

    Raises ``NotFound`` naming the nearest, ``Forgotten`` for what was forgotten, ``InvalidInput`` listing the candidates of an
    ambiguous prefix.
    """
    known_user(db, user)
    _check_text(wanted, f"id of a {table}")
    found = _candidates(db, table, user, wanted, layer) if wanted and wanted.isascii() else []
    if wanted in found:
        return wanted
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(found[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
        raise InvalidInput(
            f"{wanted!r} could be more than one {table}: {shown}.", hint="Give more of the id."
        )
    if (stone := _tombstone(db, table, user, wanted)) is not None:
        raise Forgotten(
            f"{stone['id']} was forgotten on {stone['at'][:10]}.",
            hint="Nothing of it is left in this home; a backup from before may still hold it.",
        )
    of = f"{user}'s layer {layer}" if layer else user
    raise NotFound(
        f"{of} has no {table} {wanted[:80]!a}.",
        hint=nearest(wanted, _near(db, table, user, wanted, layer), what=table),
    )


def _candidates(
    db: sqlite_utils.Database, table: Table, user: str, wanted: str, layer: str | None
) -> list[str]:
    narrowed = " and layer = ?4" if layer else ""
    more = [layer] if layer else []
    by_id = f"select id from {table} where user = ?1 and id >= ?2 and id < ?3{narrowed}"
    by_digest = f"select id from {table} where user = ?1 and digest >= ?2 and digest < ?3{narrowed}"
    sql = f"{by_id} union {by_digest}" if table == "revision" else by_id
    # Ids sort, so the exact one comes first among all that it is a prefix of, and the limit cannot hide it.
    found = rows(
        db, f"{sql} order by id limit {_SHOWN + 1}", user, wanted, wanted + _AFTER_ASCII, *more
    )
    return [each["id"] for each in found]


def _tombstone(db: sqlite_utils.Database, table: Table, user: str, wanted: str) -> Row | None:
    # A home of a former version that is read as it is has forgotten nothing.
    if not (wanted and wanted.isascii() and has_tombstones(db)):
        return None
    found = rows(
        db,
        "select id, at from tombstone where user = ? and id >= ? and id < ? and kind = ? order by id limit 2",
        user,
        wanted,
        wanted + _AFTER_ASCII,
        table,
    )
    return (
        found[0]
        if len({each["id"] for each in found}) == 1 or (found and found[0]["id"] == wanted)
        else None
    )


def has_tombstones(db: sqlite_utils.Database) -> bool:
    """Whether the schema knows them already."""
    return row(db, "select 1 from sqlite_master where name = 'tombstone'") is not None


def _near(
    db: sqlite_utils.Database, table: Table, user: str, wanted: str, layer: str | None
) -> list[str]:
    narrowed = " and layer = ?4" if layer else ""
    more = [layer] if layer else []
    found = rows(
        db,
        f"select id from (select id from {table} where user = ?1 and id >= ?2{narrowed} order by id limit ?3)"
        f" union select id from (select id from {table} where user = ?1 and id < ?2{narrowed} order by id desc limit ?3)",
        user,
        _ascii(wanted),
        _NEIGHBOURS,
        *more,
    )
    return [each["id"] for each in found]


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def _check_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise InvalidInput(f"{value!a:.80} is no {what}.", hint="Give a string.")
