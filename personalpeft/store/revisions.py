"""From what was built to rows: one way for one revision and for a million.

Invariants: a file is durable before the transaction that names it is; a revision, its provenance, its judgement, its report and the move
of its head are entries of its user in this order. Whoever calls holds the transaction: either all of it lands, or nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import sqlite_utils

from personalpeft.errors import Damaged, InvalidInput
from personalpeft.ids import check_layer_name
from personalpeft.store import hash_chain
from personalpeft.store.base import Build
from personalpeft.store.blobs import FileBlobs
from personalpeft.store.database import Row, row, rows
from personalpeft.store.id_lookup import known_id, known_user
from personalpeft.types import HeadMove, Json, Revision

_ROLES = frozenset({"train", "pinned"})
# A blob that many builds share is hashed and written once; but what is remembered for that must not grow without end.
_REMEMBERED_BYTES = 32 << 20


class Files:
    """The blobs of many builds. Those just seen are known by the very object, so that a million builds may share a few."""

    def __init__(self, blobs: FileBlobs) -> None:
        self._blobs = blobs
        self._seen: dict[int, tuple[bytes, str]] = {}
        self._durable: set[str] = set()
        self._bytes = 0

    def digest(self, blob: bytes) -> str:
        """SHA-256 of the blob."""
        known = self._seen.get(id(blob))
        if known is not None:  # The object is kept, so that no other can have its id.
            return known[1]
        digest = hashlib.sha256(blob).hexdigest()
        if self._bytes + len(blob) > _REMEMBERED_BYTES:
            self._seen, self._durable, self._bytes = {}, set(), 0
        self._seen[id(blob)] = blob, digest
        self._bytes += len(blob)
        return digest

    def put(self, blobs: Iterable[bytes]) -> None:
        """Makes them durable, those of them that were not yet."""
        new = {self.digest(blob): blob for blob in blobs}
        self._durable.update(
            self._blobs.put_all(blob for digest, blob in new.items() if digest not in self._durable)
        )


def check(build: Build, digest: str) -> None:
    """Whether the build fits together by itself; ``digest`` is that of its blob. Raises ``Damaged``, ``InvalidId``, ``InvalidInput``."""
    revision = build.revision
    check_layer_name(revision.layer)
    if digest != revision.digest:
        raise Damaged(
            f"The packed file of {revision.id} is not what its digest says.",
            hint="Build the revision again.",
        )
    if revision.id != f"{revision.layer}@{revision.digest[:12]}":
        raise InvalidInput(
            f"{revision.id!a} is not the id of this revision.",
            hint="An id is <layer>@<first 12 of the digest>.",
        )
    if unfit := set(revision.signals.values()) - _ROLES:
        raise InvalidInput(
            f"{sorted(unfit)} is no role of a signal.", hint="A signal is 'train' or 'pinned'."
        )


def rounds(builds: Sequence[Build]) -> Iterator[list[Build]]:
    """The builds in rounds, each with at most one of each user: so each build sees what was recorded of its user before."""
    while builds:
        now: dict[str, Build] = {}
        later = [
            build for build in builds if now.setdefault(build.revision.user, build) is not build
        ]
        yield list(now.values())
        builds = later


def is_there(db: sqlite_utils.Database, revision: Revision) -> bool:
    """Whether this very revision is recorded. Raises ``InvalidInput`` where another one has its id."""
    found = row(
        db, "select digest from revision where user = ? and id = ?", revision.user, revision.id
    )
    if found is not None and found["digest"] != revision.digest:
        raise InvalidInput(
            f"Another revision is called {revision.id}.", hint="Build with another seed."
        )
    return found is not None


def record(db: sqlite_utils.Database, files: Files, builds: Sequence[Build], at: datetime) -> None:
    """Adds one round of builds, of users that are there. A revision that is recorded already is judged anew.

    Raises ``NotFound`` for a parent or signal that the user does not have, ``InvalidInput`` for what cannot be written as JSON and for
    training on a signal that was pinned for the layer.
    """
    chains = hash_chain.Chains(db)
    layers, provenance, moves = [], [], []
    for build in builds:
        known = is_there(db, build.revision)
        revision = _resolved(db, build.revision, trained_now=not known)
        user, layer = revision.user, revision.layer
        layers.append((user, layer))
        if not known:
            chains.append(user, "revision", _built(revision))
        judge(chains, revision, build.report, at)
        provenance += [
            (user, revision.id, signal, layer, role) for signal, role in revision.signals.items()
        ]
        if build.promote:
            moves.append((user, layer, revision.id, build.cause))
    files.put(build.blob for build in builds)
    db.conn.executemany(
        "insert into layer (user, name, born) values (?1, ?2, (select count(*) from layer where user = ?1))"
        " on conflict do nothing",
        layers,
    )
    chains.write()
    # A signal keeps the role it first had in this revision: the bytes were trained on it, or they were not.
    db.conn.executemany(
        "insert into provenance (user, revision, signal, layer, role) values (?, ?, ?, ?, ?) on conflict do nothing",
        provenance,
    )
    move_heads(db, chains, moves, at)


def judge(chains: hash_chain.Chains, revision: Revision, report: Json, at: datetime) -> None:
    """Appends what was said of a revision, and the report of it. Raises ``InvalidInput`` for what cannot be written as JSON."""
    now = hash_chain.as_text(at)
    chains.append(revision.user, "judgement", {**_judged(revision), "at": now})
    body = hash_chain.as_json(report, what="report")
    chains.append(revision.user, "report", {"revision": revision.id, "at": now, "body": body})


def move_heads(
    db: sqlite_utils.Database,
    chains: hash_chain.Chains,
    moves: Iterable[tuple[str, str, str | None, str]],
    at: datetime,
) -> tuple[HeadMove, ...]:
    """Moves heads of layers that are there: user, layer, where to, cause. Moving to where a head is records nothing."""
    done = []
    for user, layer, to, cause in moves:
        (found,) = rows(db, "select head from layer where user = ? and name = ?", user, layer)
        done.append(HeadMove(user, layer, found["head"], to, cause, at))
    new = [move for move in done if move.before != move.after]
    for move in new:
        said = {
            "layer": move.layer,
            "before": move.before,
            "after": move.after,
            "cause": move.cause,
        }
        chains.append(move.user, "move", {**said, "at": hash_chain.as_text(at)})
    chains.write()
    db.conn.executemany(
        "update layer set head = ? where user = ? and name = ?",
        [(move.after, move.user, move.layer) for move in new],
    )
    return tuple(done)


def pinned(db: sqlite_utils.Database, user: str, layer: str) -> tuple[str, ...]:
    """Signals held back for the layer, oldest first."""
    found = rows(
        db,
        "select s.id from signal s where s.user = ?1 and s.id in"
        " (select p.signal from provenance p where p.user = ?1 and p.layer = ?2 and p.role = 'pinned') order by s.seq",
        user,
        layer,
    )
    return tuple(each["id"] for each in found)


def _resolved(db: sqlite_utils.Database, revision: Revision, *, trained_now: bool) -> Revision:
    """The revision with the full ids of its parent and signals, after seeing that they are there and may be used so."""
    user, layer = known_user(db, revision.user), revision.layer
    parent = revision.parent and known_id(db, "revision", user, revision.parent, layer=layer)
    signals = {
        known_id(db, "signal", user, signal): role for signal, role in revision.signals.items()
    }
    # One that is there already was trained before the pin: judging it anew trains on nothing.
    held_back = pinned(db, user, layer) if trained_now and signals else ()
    if spoiled := [signal for signal in held_back if signals.get(signal) == "train"]:
        raise InvalidInput(
            f"{spoiled[0]} is pinned as a question for {layer} and cannot be trained on.",
            hint="Leave it out of the training examples.",
        )
    return replace(revision, parent=parent, signals=signals)


def _built(revision: Revision) -> Row:
    below: list[list[Any]] = [[e.layer, e.revision, e.digest, e.weight] for e in revision.below]
    if not math.isfinite(revision.seconds):
        raise InvalidInput(
            f"{revision.id} took {revision.seconds} seconds.",
            hint="Give a finite number of seconds.",
        )
    return {
        "id": revision.id,
        "layer": revision.layer,
        "digest": revision.digest,
        "base": revision.base,
        "parent": revision.parent,
        "below": hash_chain.as_json(below, what="list of layers below"),
        "recipe": hash_chain.as_json(revision.recipe, what="recipe"),
        "inputs": revision.inputs,
        "at": hash_chain.as_text(revision.at),
        "seconds": float(revision.seconds),
    }


def _judged(revision: Revision) -> Row:
    return {
        "revision": revision.id,
        "verdict": str(revision.verdict),
        "reason": revision.reason,
        "probation": int(revision.probation),
        "scores": hash_chain.as_json(revision.scores, what="scores"),
        "signals": hash_chain.as_json(revision.signals, what="provenance"),
    }
