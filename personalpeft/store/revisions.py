"""Writes revisions, judgements and head moves: the same way for one revision and for a million.

Invariants: a file is durable before the transaction that names it commits. A revision, its
judgement, its report and its head move are entries of its user in this order. The caller holds the
write transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from personalpeft.errors import Damaged, InvalidInput
from personalpeft.ids import check_layer_name
from personalpeft.store import rows
from personalpeft.store.blobs import DIGEST, Blobs
from personalpeft.store.database import fetch_all, fetch_one
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import ChainWriter
from personalpeft.store.id_lookup import resolve_id, resolve_user
from personalpeft.store.types import NewRevision
from personalpeft.types import HeadMove, Json, Revision

_ROLES = frozenset({"train", "pinned"})


def check_revisions(revisions: Sequence[NewRevision]) -> None:
    """Check each revision: ``Damaged`` for a wrong blob, ``InvalidInput`` for an invalid name."""
    digests = {key: hashlib.sha256(blob).hexdigest() for key, blob in _distinct(revisions).items()}
    for new in revisions:
        revision = new.revision
        check_layer_name(revision.layer)
        if digests[id(new.blob)] != revision.digest:
            raise Damaged(
                f"The packed file of {revision.id} does not match its digest.",
                hint="Build the revision again.",
            )
        expected = f"{revision.layer}@{revision.digest[:12]}"
        if revision.id != expected:
            raise InvalidInput(
                f"The revision's id must be {expected}, got {revision.id!a}.",
                hint="It is <layer>@<first 12 digits of the digest>.",
            )
        if invalid := set(revision.signals.values()) - _ROLES:
            raise InvalidInput(
                f"A signal's role must be 'train' or 'pinned', got {sorted(invalid)}."
            )


def split_rounds(revisions: Sequence[NewRevision]) -> Iterator[list[NewRevision]]:
    """Yield rounds with one revision of each user, so that each sees its user's earlier ones."""
    while revisions:
        first: dict[str, NewRevision] = {}
        later = [new for new in revisions if first.setdefault(new.revision.user, new) is not new]
        yield list(first.values())
        revisions = later


def is_recorded(db: sqlite3.Connection, revision: Revision) -> bool:
    """Return whether this revision is recorded. Raises ``InvalidInput`` if another has its id."""
    sql = "select digest from revision where user = ? and id = ?"
    row = fetch_one(db, sql, revision.user, revision.id)
    if row is not None and row["digest"] != revision.digest:
        raise InvalidInput(
            f"Another revision has the id {revision.id}.", hint="Build with another seed."
        )
    return row is not None


def record_revisions(
    db: sqlite3.Connection, blobs: Blobs, revisions: Sequence[NewRevision], at: datetime
) -> None:
    """Record one round of revisions. One that is recorded already only gets a new judgement.

    Raises ``NotFound`` for a parent or signal that the user does not have, ``InvalidInput`` for
    invalid JSON or if a pinned signal was trained on.
    """
    writer = ChainWriter(db)
    layers, provenance, moves = [], [], []
    for new in revisions:
        known = is_recorded(db, new.revision)
        revision = _resolve_references(db, new.revision, trained=not known)
        user, layer = revision.user, revision.layer
        layers.append((user, layer))
        if not known:
            below = rows.encode_entries(revision.below)
            writer.append(user, "revision", rows.encode("revision", revision, below=below))
        append_judgement(writer, revision, new.report, at)
        provenance += [
            (user, revision.id, signal, layer, role) for signal, role in revision.signals.items()
        ]
        if new.promote:
            moves.append((user, layer, revision.id, new.cause))
    blobs.put_many(_distinct(revisions).values())
    db.executemany(
        "insert into layer (user, name, born)"
        " values (?1, ?2, (select count(*) from layer where user = ?1)) on conflict do nothing",
        layers,
    )
    writer.flush()
    # A signal keeps its first role: this file was trained on it, or it was not.
    db.executemany(
        "insert into provenance (user, revision, signal, layer, role) values (?, ?, ?, ?, ?)"
        " on conflict do nothing",
        provenance,
    )
    move_heads(db, writer, moves, at)


def append_judgement(writer: ChainWriter, revision: Revision, report: Json, at: datetime) -> None:
    """Append a judgement of a revision and its report. Raises ``InvalidInput`` for invalid JSON."""
    judgement = rows.encode("judgement", revision, revision=revision.id, at=at)
    writer.append(revision.user, "judgement", judgement)
    row = rows.encode("report", revision=revision.id, at=at, body=report)
    writer.append(revision.user, "report", row)


def move_heads(
    db: sqlite3.Connection,
    writer: ChainWriter,
    moves: Iterable[tuple[str, str, str | None, str]],
    at: datetime,
) -> tuple[HeadMove, ...]:
    """Move heads, each given by user, layer, new head and cause.

    A move to the present head is returned, but not recorded.
    """
    done = [
        HeadMove(user, layer, read_head(db, user, layer), to, cause, at)
        for user, layer, to, cause in moves
    ]
    new = [move for move in done if move.before != move.after]
    for move in new:
        writer.append(move.user, "move", rows.encode("move", move))
    writer.flush()
    db.executemany(
        "update layer set head = ? where user = ? and name = ?",
        [(move.after, move.user, move.layer) for move in new],
    )
    return tuple(done)


def read_head(db: sqlite3.Connection, user: str, layer: str) -> str | None:
    """Return the head of a layer, or None for a layer that does not exist yet."""
    row = fetch_one(db, "select head from layer where user = ? and name = ?", user, layer)
    return row["head"] if row is not None else None


def read_holdout(db: sqlite3.Connection, user: str, layer: str) -> tuple[str, ...]:
    """Return the signals that are held out for a layer, oldest first."""
    pinned = fetch_all(
        db,
        "select s.id from signal s where s.user = ?1 and s.id in (select p.signal from provenance p"
        " where p.user = ?1 and p.layer = ?2 and p.role = 'pinned') order by s.seq",
        user,
        layer,
    )
    return tuple(row["id"] for row in pinned)


def unnamed_blobs(db: sqlite3.Connection, names: Collection[str]) -> frozenset[str]:
    """Return those file names that are no digest, or one that no revision of any user names."""
    digests = [name for name in names if DIGEST.fullmatch(name)]
    unnamed = fetch_all(
        db,
        "select value from json_each(?)"
        " where not exists (select 1 from revision r where r.digest = value)",
        json.dumps(digests),
    )
    return frozenset(names) - frozenset(digests) | {row["value"] for row in unnamed}


def _distinct(revisions: Iterable[NewRevision]) -> dict[int, bytes]:
    """Return the blobs by object, since many revisions may share one."""
    return {id(new.blob): new.blob for new in revisions}


def _resolve_references(db: sqlite3.Connection, revision: Revision, *, trained: bool) -> Revision:
    """Return the revision with full ids of its parent and signals, after checking them."""
    user, layer = resolve_user(db, revision.user), revision.layer
    parent = revision.parent and resolve_id(db, "revision", user, revision.parent, layer=layer)
    signals = {
        resolve_id(db, "signal", user, signal): role for signal, role in revision.signals.items()
    }
    # A recorded revision was trained before the pin, and a new judgement trains on nothing.
    pinned = read_holdout(db, user, layer) if trained and signals else ()
    for signal in pinned:
        if signals.get(signal) == "train":
            raise InvalidInput(
                f"{signal} is held out for {layer} and cannot be trained on.",
                hint="Leave it out of the training examples.",
            )
    return replace(revision, parent=parent, signals=signals)
