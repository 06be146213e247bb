"""What was built from the ledger: users, layers, revisions, their judgements, heads and reports.

Invariants: a revision says how it was built and never changes; what the gate said of it is a judgement, and a new judgement is a new row,
so that a verdict that was replaced can still be read. A layer's head is where its last recorded move went. A signal that was pinned
for a layer is never trained on in that layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlite_utils

from personalpeft.errors import BaseMismatch, Damaged, InvalidInput
from personalpeft.ids import check_layer_name
from personalpeft.store import entries
from personalpeft.store.base import UserSummary
from personalpeft.store.blobs import FileBlobs
from personalpeft.store.database import Database, Row, insert, row, rows
from personalpeft.store.lookup import known_id, known_layer, known_user
from personalpeft.types import HeadMove, Json, Layer, Revision, Stack, StackEntry, Verdict

_ROLES = frozenset({"train", "pinned"})

_SUMMARY = """
select u.id, u.since,
    (select count(*) from turn t where t.user = u.id) as turns,
    (select count(*) from signal s where s.user = u.id) as signals,
    (select count(*) from revision r where r.user = u.id) as revisions
from user u
"""

_LAYERS = """
select l.name, l.head, l.weight, r.digest, r.base
from layer l left join revision r on r.user = l.user and r.id = l.head
where l.user = ?
order by case l.name when 'style' then 0 when 'memory' then 2 else 1 end, l.born
"""

_REVISIONS = """
select r.*, j.verdict, j.reason, j.probation, j.scores,
    (select json_group_object(p.signal, p.role) from provenance p where p.user = r.user and p.revision = r.id) as signals
from revision r join judgement j on j.user = r.user and j.revision = r.id
where j.seq = (select max(seq) from judgement where user = r.user and revision = r.id) and r.user = ?
"""


class SqliteCatalog:
    """The ``Catalog`` of a home."""

    def __init__(self, database: Database, blobs: FileBlobs, *, now: Callable[[], datetime]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    def ensure_user(self, user: str) -> None:
        """Makes the user where there is none. Raises ``InvalidId``."""
        with self._database.writing() as db:
            entries.ensure_user(db, user, self._now())

    def users(self) -> tuple[UserSummary, ...]:
        """All users, by id."""
        with self._database.reading() as db:
            return tuple(_summary_from(found) for found in rows(db, _SUMMARY + " order by u.id"))

    def user(self, user: str) -> UserSummary:
        """One user. Raises ``NotFound``."""
        with self._database.reading() as db:
            known_user(db, user)
            (found,) = rows(db, _SUMMARY + " where u.id = ?", user)
            return _summary_from(found)

    def layers(self, user: str) -> tuple[Layer, ...]:
        """Lowest first; none where nothing was learned yet. Raises ``NotFound`` for an unknown user."""
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(db, _LAYERS, user)
        return tuple(Layer(each["name"], position, each["head"], each["weight"]) for position, each in enumerate(found))

    def stack(self, user: str, base: str) -> Stack:
        """The live stack. Raises ``NotFound`` for an unknown user, ``BaseMismatch`` when a head was built on another base."""
        with self._database.reading() as db:
            known_user(db, user)
            live = [found for found in rows(db, _LAYERS, user) if found["head"] is not None]
        for each in live:
            _check_base(each["head"], each["base"], base)
        return Stack(
            base, tuple(StackEntry(each["name"], each["head"], each["digest"], each["weight"]) for each in live)
        )

    def revision(self, user: str, revision_id: str) -> Revision:
        """One revision. Raises ``NotFound``, and ``InvalidInput`` for an ambiguous prefix."""
        with self._database.reading() as db:
            wanted = known_id(db, "revision", user, revision_id)
            (found,) = rows(db, _REVISIONS + " and r.id = ?", user, wanted)
        return _revision_from(found)

    def revisions(self, user: str, *, layer: str | None = None) -> tuple[Revision, ...]:
        """Oldest first, refused ones too. Raises ``NotFound`` for an unknown user or layer."""
        with self._database.reading() as db:
            if layer is None:
                known_user(db, user)
                found = rows(db, _REVISIONS + " order by r.seq", user)
            else:
                known_layer(db, user, layer)
                found = rows(db, _REVISIONS + " and r.layer = ? order by r.seq", user, layer)
        return tuple(_revision_from(each) for each in found)

    def add_revision(self, revision: Revision, blob: bytes, report: Json, *, promote: bool, cause: str) -> None:
        """Records a revision with its provenance, judgement and report, and, if ``promote``, makes it the head.

        Of an identical revision that is there already, how it was built stays as recorded; the new judgement is added and counts.
        Raises ``Damaged`` when the blob is not what the revision's digest says; ``NotFound`` for a parent or signal that the user does
        not have; ``InvalidInput`` for an id or roles that do not fit, and for training on a signal that was pinned for this layer.
        """
        check_layer_name(revision.layer)
        if hashlib.sha256(blob).hexdigest() != revision.digest:
            raise Damaged(
                f"The packed file of {revision.id} is not what its digest says.", hint="Build the revision again."
            )
        if revision.id != f"{revision.layer}@{revision.digest[:12]}":
            raise InvalidInput(
                f"{revision.id!a} is not the id of this revision.", hint="An id is <layer>@<first 12 of the digest>."
            )
        if unfit := set(revision.signals.values()) - _ROLES:
            raise InvalidInput(f"{sorted(unfit)} is no role of a signal.", hint="A signal is 'train' or 'pinned'.")
        body = entries.as_json(report, what="report")
        # One turn for file and rows: verify must never find the blob of a revision that is on its way.
        with self._database.turn_to_write():
            with self._database.reading() as db:
                revision = _resolved(db, revision)
            built, judged = _built(revision), _judged(revision)
            self._blobs.put(blob)
            with self._database.writing() as db:
                at = self._now()
                _add_layer(db, revision.user, revision.layer)
                if not row(db, "select 1 from revision where user = ? and id = ?", revision.user, revision.id):
                    entries.append(db, revision.user, "revision", built)
                entries.append(db, revision.user, "judgement", {**judged, "at": entries.as_text(at)})
                _add_provenance(db, revision)
                said = {"revision": revision.id, "at": entries.as_text(at), "body": body}
                entries.append(db, revision.user, "report", said)
                if promote:
                    _move(db, revision.user, revision.layer, revision.id, cause, at)

    def add_report(self, user: str, report: Json) -> None:
        """Records a learn that made no revision. Raises ``InvalidInput`` and ``NotFound``."""
        body = entries.as_json(report, what="report")
        with self._database.writing() as db:
            known_user(db, user)
            entries.append(db, user, "report", {"at": entries.as_text(self._now()), "body": body})

    def reports(self, user: str) -> tuple[Json, ...]:
        """Oldest first. Raises ``NotFound``."""
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(db, "select body from report where user = ? order by seq", user)
        return tuple(entries.from_json(each["body"]) for each in found)

    def move_head(self, user: str, layer: str, to: str | None, *, base: str, cause: str) -> HeadMove:
        """Makes another revision (None: the bare base) the head, a refused one too. Moving to where the head is records nothing, and the
        move that is returned begins where it ends. Raises ``NotFound``, ``BaseMismatch``, ``Damaged``."""
        with self._database.turn_to_write():
            if to is not None:
                with self._database.reading() as db:
                    known_layer(db, user, layer)
                    to = known_id(db, "revision", user, to, layer=layer)
                    (found,) = rows(db, "select digest, base from revision where user = ? and id = ?", user, to)
                _check_base(to, found["base"], base)
                self._blobs.read(found["digest"])
            with self._database.writing() as db:
                known_layer(db, user, layer)
                return _move(db, user, layer, to, cause, self._now())

    def history(self, user: str, *, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Every move of a head, oldest first. Raises ``NotFound`` for an unknown user or layer."""
        with self._database.reading() as db:
            if layer is None:
                known_user(db, user)
                found = rows(db, "select * from move where user = ? order by seq", user)
            else:
                known_layer(db, user, layer)
                found = rows(db, "select * from move where user = ? and layer = ? order by seq", user, layer)
        return tuple(
            HeadMove(m["user"], m["layer"], m["before"], m["after"], m["cause"], entries.as_moment(m["at"]))
            for m in found
        )

    def set_weight(self, user: str, layer: str, weight: float) -> None:
        """How strongly the layer is added from now on. Raises ``NotFound``, and ``InvalidInput`` for a weight that is not finite."""
        if not math.isfinite(weight):
            raise InvalidInput(f"The weight {weight} is not a finite number.", hint="Give a number such as 0.5.")
        with self._database.writing() as db:
            known_layer(db, user, layer)
            db.execute("update layer set weight = ? where user = ? and name = ?", [float(weight), user, layer])

    def pinned(self, user: str, layer: str) -> tuple[str, ...]:
        """Signals held back as questions for this layer for ever, oldest first; none for a layer that is not there yet."""
        with self._database.reading() as db:
            known_user(db, user)
            return _pinned(db, user, layer)

    def considered(self, user: str, layer: str) -> frozenset[str]:
        """Signals in the provenance of any revision of this layer; none for a layer that is not there yet."""
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(db, "select distinct signal from provenance where user = ? and layer = ?", user, layer)
        return frozenset(each["signal"] for each in found)

    def vectors(self, user: str, embedder: str) -> Mapping[str, npt.NDArray[np.float32]]:
        """Known embeddings by signal id, ``[size]`` each, not to be written to; oldest signal first."""
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(
                db,
                "select v.signal, v.data from vector v join signal s on s.user = v.user and s.id = v.signal"
                " where v.user = ? and v.embedder = ? order by s.seq",
                user,
                embedder,
            )
        return {each["signal"]: np.frombuffer(each["data"], dtype="<f4") for each in found}

    def add_vectors(self, user: str, embedder: str, vectors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Keeps embeddings, in place of older ones. Raises ``NotFound`` for a signal that the user does not have, ``InvalidInput`` for
        what is not one row of finite numbers."""
        for signal, vector in vectors.items():
            if vector.ndim != 1 or vector.size == 0 or not np.isfinite(vector).all():
                raise InvalidInput(f"The vector of {signal} is not one row of finite numbers.", hint="Embed it again.")
        with self._database.writing() as db:
            known_user(db, user)
            for signal, vector in vectors.items():
                db.execute(
                    "insert or replace into vector (user, embedder, signal, data) values (?, ?, ?, ?)",
                    [user, embedder, known_id(db, "signal", user, signal), vector.astype("<f4").tobytes()],
                )


def _check_base(revision: str, built_on: str, base: str) -> None:
    if built_on != base:
        raise BaseMismatch(
            f"{revision} was built on the base {built_on}, not on {base}.",
            hint="Open the base that it was built on; or, on this one, roll the layer back to the bare base and learn anew.",
        )


def _resolved(db: sqlite_utils.Database, revision: Revision) -> Revision:
    """The revision with the full ids of its parent and signals, after seeing that they are there and may be used so."""
    user, layer = known_user(db, revision.user), revision.layer
    parent = revision.parent and known_id(db, "revision", user, revision.parent, layer=layer)
    signals = {known_id(db, "signal", user, signal): role for signal, role in revision.signals.items()}
    there = row(db, "select digest from revision where user = ? and id = ?", user, revision.id)
    if there is not None and there["digest"] != revision.digest:
        raise InvalidInput(f"Another revision is called {revision.id}.", hint="Build with another seed.")
    # One that is there already was trained before the pin: judging it anew trains on nothing.
    pinned = _pinned(db, user, layer) if there is None else ()
    if spoiled := [signal for signal in pinned if signals.get(signal) == "train"]:
        raise InvalidInput(
            f"{spoiled[0]} is pinned as a question for {layer} and cannot be trained on.",
            hint="Leave it out of the training examples.",
        )
    return replace(revision, parent=parent, signals=signals)


def _pinned(db: sqlite_utils.Database, user: str, layer: str) -> tuple[str, ...]:
    found = rows(
        db,
        "select s.id from signal s where s.user = ?1 and s.id in"
        " (select p.signal from provenance p where p.user = ?1 and p.layer = ?2 and p.role = 'pinned') order by s.seq",
        user,
        layer,
    )
    return tuple(each["id"] for each in found)


def _built(revision: Revision) -> Row:
    below: list[list[Any]] = [[e.layer, e.revision, e.digest, e.weight] for e in revision.below]
    if not math.isfinite(revision.seconds):
        raise InvalidInput(f"{revision.id} took {revision.seconds} seconds.", hint="Give a finite number of seconds.")
    return {
        "id": revision.id,
        "layer": revision.layer,
        "digest": revision.digest,
        "base": revision.base,
        "parent": revision.parent,
        "below": entries.as_json(below, what="list of layers below"),
        "recipe": entries.as_json(revision.recipe, what="recipe"),
        "inputs": revision.inputs,
        "at": entries.as_text(revision.at),
        "seconds": float(revision.seconds),
    }


def _add_layer(db: sqlite_utils.Database, user: str, layer: str) -> None:
    if row(db, "select 1 from layer where user = ? and name = ?", user, layer) is None:
        (count,) = rows(db, "select count(*) as layers from layer where user = ?", user)
        insert(db, "layer", {"user": user, "name": layer, "born": count["layers"]})


def _judged(revision: Revision) -> Row:
    return {
        "revision": revision.id,
        "verdict": str(revision.verdict),
        "reason": revision.reason,
        "probation": int(revision.probation),
        "scores": entries.as_json(revision.scores, what="scores"),
        "signals": entries.as_json(revision.signals, what="provenance"),
    }


def _add_provenance(db: sqlite_utils.Database, revision: Revision) -> None:
    for signal, role in revision.signals.items():
        # A signal keeps the role it first had in this revision: the bytes were trained on it, or they were not.
        db.execute(
            "insert into provenance (user, revision, signal, layer, role) values (?, ?, ?, ?, ?) on conflict do nothing",
            [revision.user, revision.id, signal, revision.layer, role],
        )


def _move(db: sqlite_utils.Database, user: str, layer: str, to: str | None, cause: str, at: datetime) -> HeadMove:
    (found,) = rows(db, "select head from layer where user = ? and name = ?", user, layer)
    before: str | None = found["head"]
    if before != to:
        moved = {"layer": layer, "before": before, "after": to, "cause": cause, "at": entries.as_text(at)}
        entries.append(db, user, "move", moved)
        db.execute("update layer set head = ? where user = ? and name = ?", [to, user, layer])
    return HeadMove(user, layer, before, to, cause, at)


def _summary_from(found: Row) -> UserSummary:
    since = entries.as_moment(found["since"])
    return UserSummary(found["id"], since, found["turns"], found["signals"], found["revisions"])


def _revision_from(found: Row) -> Revision:
    return Revision(
        id=found["id"],
        user=found["user"],
        layer=found["layer"],
        digest=found["digest"],
        base=found["base"],
        parent=found["parent"],
        below=tuple(StackEntry(*entry) for entry in entries.from_json(found["below"])),
        recipe=entries.from_json(found["recipe"]),
        inputs=found["inputs"],
        signals=entries.from_json(found["signals"]),
        scores=entries.from_json(found["scores"]),
        verdict=Verdict(found["verdict"]),
        reason=found["reason"],
        probation=bool(found["probation"]),
        at=entries.as_moment(found["at"]),
        seconds=found["seconds"],
    )
