"""Writes revisions, judgements and head moves, and reads what is recorded of a build.

Invariants: a revision, its judgement, its report and its head move are entries of its user in this
order. The caller holds the write transaction, and stores the file before it commits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile

from personalpeft.errors import Damaged, InvalidInput
from personalpeft.ids import check_layer_name
from personalpeft.store import rows
from personalpeft.store.blobs import DIGEST
from personalpeft.store.database import Database, Row, fetch_all, fetch_one
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import NewEntry, append_entries
from personalpeft.store.id_lookup import resolve_id, resolve_user
from personalpeft.store.types import BuildRecord
from personalpeft.types import HeadMove, Json, Revision, SignalRole

# More do not arrive while one layer is trained.
_MAX_ARRIVALS = 32


def check_revision(revision: Revision, blob: bytes) -> None:
    """Check a revision: ``Damaged`` for a wrong blob, ``InvalidInput`` for an invalid name."""
    check_layer_name(revision.layer)
    if hashlib.sha256(blob).hexdigest() != revision.digest:
        raise Damaged(
            f"The packed file of {revision.id} does not match its digest.",
            hint="Build the revision again.",
        )
    expected = f"{revision.layer}@{revision.digest[:12]}"
    if revision.id != expected or not set(revision.signals.values()) <= set(SignalRole):
        raise InvalidInput(
            f"The revision {revision.id!a} must be {expected}, with the roles of its signals: "
            f"{', '.join(SignalRole)}.",
            hint="Build the revision again.",
        )


def is_recorded(db: sqlite3.Connection, revision: Revision) -> bool:
    """Return whether this revision is recorded. Raises ``InvalidInput`` if another has its id."""
    sql = "select digest from revision where user = ? and id = ?"
    row = fetch_one(db, sql, revision.user, revision.id)
    if row is not None and row["digest"] != revision.digest:
        raise InvalidInput(
            f"Another revision has the id {revision.id}.", hint="Build with another seed."
        )
    return row is not None


def record_revision(
    db: sqlite3.Connection,
    revision: Revision,
    report: Json,
    *,
    promote: bool,
    cause: str,
    at: datetime,
) -> None:
    """Record a revision. One that is recorded already only gets a new judgement.

    Args:
        db: A connection in a write transaction, which stores the blob before it commits.
        revision: What ``check_revision`` accepted, of an existing user.
        report: The report of its learn.
        promote: Whether it becomes the head.
        cause: The cause of that move.
        at: The time of the judgement.

    Raises:
        NotFound: The user does not have the parent or a signal.
        InvalidInput: The JSON is invalid, or a held-out signal was trained on.
    """
    known = is_recorded(db, revision)
    revision = _resolve_references(db, revision, trained=not known)
    user, layer = revision.user, revision.layer
    ensure_layer(db, user, layer)
    if not known:
        row = rows.encode("revision", revision, below=rows.encode_entries(revision.below))
        append_entries(db, user, [NewEntry("revision", row)])
    record_judgement(db, revision, report, at)
    if promote:
        move_head(db, user, layer, revision.id, cause=cause, at=at)


def record_judgement(
    db: sqlite3.Connection, revision: Revision, report: Json, at: datetime
) -> None:
    """Record a judgement of a revision: its verdict, and the report of its learn."""
    judgement = rows.encode("judgement", revision, revision=revision.id, at=at)
    body = rows.encode("report", revision=revision.id, at=at, body=report)
    append_and_apply(
        db, revision.user, [NewEntry("judgement", judgement), NewEntry("report", body)]
    )


def append_and_apply(db: sqlite3.Connection, user: str, entries: Sequence[NewEntry]) -> None:
    """Append entries, and set what follows from them: the roles of signals, and the heads.

    A signal keeps its first role in a revision: the file was trained on it, or it was not. The
    layers must exist.
    """
    append_entries(db, user, entries)
    for entry in entries:
        if entry.kind == "judgement" and not entry.is_erased:
            _record_roles(db, user, entry.content)
        elif entry.kind == "move" and not entry.is_erased:
            set_head(db, user, entry.content["layer"], entry.content["after"])


def _record_roles(db: sqlite3.Connection, user: str, judgement: Row) -> None:
    revision, roles = judgement["revision"], rows.decode_roles(judgement["signals"])
    db.executemany(
        "insert into provenance (user, revision, signal, layer, role)"
        " select user, id, ?, layer, ? from revision where user = ? and id = ?"
        " on conflict do nothing",
        [(signal, role, user, revision) for signal, role in roles.items()],
    )


def ensure_layer(db: sqlite3.Connection, user: str, layer: str) -> None:
    """Create a layer of a user unless it exists."""
    db.execute(
        "insert into layer (user, name, born)"
        " values (?1, ?2, (select count(*) from layer where user = ?1)) on conflict do nothing",
        [user, layer],
    )


def move_head(
    db: sqlite3.Connection, user: str, layer: str, to: str | None, *, cause: str, at: datetime
) -> HeadMove:
    """Set the head of a layer, and return the move. One to the present head is not recorded."""
    move = HeadMove(user, layer, read_head(db, user, layer), to, cause, at)
    if move.before != move.after:
        append_and_apply(db, user, [NewEntry("move", rows.encode("move", move))])
    return move


def read_head(db: sqlite3.Connection, user: str, layer: str) -> str | None:
    """Return the head of a layer, or None for a layer that does not exist yet."""
    row = fetch_one(db, "select head from layer where user = ? and name = ?", user, layer)
    return row["head"] if row is not None else None


def read_holdout(db: sqlite3.Connection, user: str, layer: str) -> tuple[str, ...]:
    """Return the signals that are held out for a layer, oldest first."""
    sql = (
        "select s.id from signal s where s.user = ?1 and s.id in (select p.signal from provenance p"
        " where p.user = ?1 and p.layer = ?2 and p.role in ('held_out', 'pinned')) order by s.seq"
    )
    return tuple(row["id"] for row in fetch_all(db, sql, user, layer))


def read_build_record(db: sqlite3.Connection, user: str, revision: str) -> BuildRecord:
    """Return what is recorded of a build beside its revision, by its full id."""
    sql = "select seq, at, seconds, recipe from revision where user = ? and id = ?"
    (built,) = fetch_all(db, sql, user, revision)
    sql = "select revision, signals from judgement where user = ? and revision = ? order by seq"
    roles = rows.decode_roles(fetch_all(db, sql, user, revision)[0]["signals"])
    arrivals = " union all ".join(
        f"select seq, at from {kind} where user = ?1 and seq < ?2"
        for kind in ("turn", "signal", "retraction")
    )
    sql = f"select seq, at from ({arrivals}) order by seq desc limit {_MAX_ARRIVALS}"
    arrived = fetch_all(db, sql, user, built["seq"])
    began = rows.parse_time(built["at"]) - timedelta(seconds=built["seconds"])
    meanwhile = sum(1 for _ in takewhile(lambda row: rows.parse_time(row["at"]) > began, arrived))
    moments = [built["seq"], *(row["seq"] for row in arrived)]
    likeliest = moments[meanwhile]
    recipe = rows.from_json(built["recipe"])
    return BuildRecord(roles, recipe, (likeliest, *(each for each in moments if each != likeliest)))


def first_roles(judgements: Iterable[Row]) -> dict[str, dict[str, str]]:
    """Return, by revision, the role that each signal first had, from judgements in order."""
    roles: dict[str, dict[str, str]] = {}
    for row in judgements:
        known = roles.setdefault(row["revision"], {})
        for signal, role in rows.decode_roles(row["signals"]).items():
            known.setdefault(signal, role)
    return roles


def unnamed_blobs(database: Database, names: Collection[str]) -> frozenset[str]:
    """Return those file names that are no digest, or one that no revision of any user names."""
    digests = [name for name in names if DIGEST.fullmatch(name)]
    sql = (
        "select value from json_each(?)"
        " where not exists (select 1 from revision r where r.digest = value)"
    )
    unnamed = database.fetch_all(sql, json.dumps(digests))
    return frozenset(names) - frozenset(digests) | {row["value"] for row in unnamed}


def set_head(db: sqlite3.Connection, user: str, layer: str, head: str | None) -> None:
    """Set the head of a layer, without a move."""
    db.execute("update layer set head = ? where user = ? and name = ?", [head, user, layer])


def _resolve_references(db: sqlite3.Connection, revision: Revision, *, trained: bool) -> Revision:
    """Return the revision with full ids of its parent and signals, after checking them."""
    user, layer = resolve_user(db, revision.user), revision.layer
    parent = revision.parent and resolve_id(db, "revision", user, revision.parent, layer=layer)
    signals = {
        resolve_id(db, "signal", user, signal): role for signal, role in revision.signals.items()
    }
    # A recorded revision was trained before it was held out, and a new judgement trains on nothing.
    held_out = read_holdout(db, user, layer) if trained and signals else ()
    for signal in held_out:
        if signals.get(signal) == SignalRole.TRAINED:
            raise InvalidInput(
                f"{signal} is held out for {layer} and cannot be trained on.",
                hint="Leave it out of the training examples.",
            )
    return replace(revision, parent=parent, signals=signals)
