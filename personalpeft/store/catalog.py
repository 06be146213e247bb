"""What was built from the ledger: users, layers, revisions, their judgements, heads and reports.

Invariants: a revision says how it was built and never changes; what the gate said of it is a judgement, and a new judgement is a new row,
so that a verdict that was replaced can still be read. A layer's head is where its last recorded move went. A signal that was pinned
for a layer is never trained on in that layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import get_args

import numpy as np
import numpy.typing as npt
import sqlite_utils

from personalpeft.errors import BaseMismatch, Damaged, InvalidInput
from personalpeft.ids import check_user_id
from personalpeft.store import hash_chain, revisions
from personalpeft.store.base import ANY_HEAD, Build, UserSummary
from personalpeft.store.blobs import FileBlobs
from personalpeft.store.database import Database, Row, row, rows
from personalpeft.store.id_lookup import known_id, known_layer, known_user
from personalpeft.types import (
    HeadMove,
    Json,
    Layer,
    Revision,
    Scope,
    Stack,
    StackEntry,
    Verdict,
    usual_scope,
)

_SUMMARY = """
select u.id, u.since,
    (select count(*) from turn t where t.user = u.id) as turns,
    (select count(*) from signal s where s.user = u.id) as signals,
    (select count(*) from revision r where r.user = u.id) as revisions
from user u
"""

_ORDER = " order by case l.name when 'style' then 0 when 'memory' then 2 else 1 end, l.born"
# All columns, since a home of a former version that is read as it is does not have ``scope``.
_LAYERS = "select l.* from layer l where l.user = ?" + _ORDER

# Read for every request: one range of the index layer_live, and for each layer one revision by its key.
_LIVE = (
    "select l.name, l.head, l.weight, r.digest, r.base from layer l left join revision r on r.user = l.user and r.id = l.head"
    " where l.user = ? and l.head is not null" + _ORDER
)

_NOT_THERE = "Run verify to see what is hurt; roll the layer back to another revision."

_REVISIONS = """
select r.*, j.verdict, j.reason, j.probation, j.scores,
    (select json_group_object(p.signal, p.role) from provenance p where p.user = r.user and p.revision = r.id) as signals
from revision r join judgement j on j.user = r.user and j.revision = r.id
where j.seq = (select max(seq) from judgement where user = r.user and revision = r.id) and r.user = ?
"""


class SqliteCatalog:
    """The ``Catalog`` of a home."""

    def __init__(
        self, database: Database, blobs: FileBlobs, *, now: Callable[[], datetime]
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    def ensure_user(self, user: str) -> None:
        """Makes the user where there is none. Raises ``InvalidId``."""
        check_user_id(user)
        # Nearly always there: a look does not wait for whoever is writing.
        with self._database.reading() as db:
            if row(db, "select 1 from user where id = ?", user):
                return
        with self._database.writing() as db:
            hash_chain.ensure_users(db, [user], self._now())

    def users(self, *, after: str | None = None, limit: int = 100) -> tuple[UserSummary, ...]:
        """The users after ``after`` by id, who need not be there; a page shorter than ``limit`` is the last. Raises ``InvalidInput`` for a
        limit below 1, ``InvalidId``."""
        if limit < 1:
            raise InvalidInput(f"A page of {limit} users is no page.", hint="Give 1 or more.")
        start = "" if after is None else check_user_id(after)
        with self._database.reading() as db:
            found = rows(db, _SUMMARY + " where u.id > ? order by u.id limit ?", start, limit)
        return tuple(_summary_from(each) for each in found)

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
        return tuple(
            Layer(
                each["name"],
                position,
                each["head"],
                each["weight"],
                each.get("scope") or usual_scope(each["name"]),
            )
            for position, each in enumerate(found)
        )

    def stack(self, user: str, base: str) -> Stack:
        """The live stack. Raises ``NotFound`` for an unknown user, ``BaseMismatch`` when a head was built on another base, ``Damaged``
        when a head is not there."""
        with self._database.reading() as db:
            live = rows(db, _LIVE, user) if user.isascii() else []
            if not live:
                known_user(db, user)
        for each in live:
            if each["digest"] is None:
                raise Damaged(
                    f"{each['head']}, the head of {each['name']}, is not there.", hint=_NOT_THERE
                )
            _check_base(each["head"], each["base"], base)
        return Stack(
            base,
            tuple(
                StackEntry(each["name"], each["head"], each["digest"], each["weight"])
                for each in live
            ),
        )

    def revision(self, user: str, revision_id: str) -> Revision:
        """One revision. Raises ``NotFound``, and ``InvalidInput`` for an ambiguous prefix."""
        with self._database.reading() as db:
            wanted = known_id(db, "revision", user, revision_id)
            (found,) = rows(db, _REVISIONS + " and r.id = ?", user, wanted)
        return revision_from(found)

    def revisions(self, user: str, *, layer: str | None = None) -> tuple[Revision, ...]:
        """Oldest first, refused ones too. Raises ``NotFound`` for an unknown user or layer."""
        with self._database.reading() as db:
            if layer is None:
                known_user(db, user)
                found = rows(db, _REVISIONS + " order by r.seq", user)
            else:
                known_layer(db, user, layer)
                found = rows(db, _REVISIONS + " and r.layer = ? order by r.seq", user, layer)
        return tuple(revision_from(each) for each in found)

    def add_revision(
        self,
        revision: Revision,
        blob: bytes,
        report: Json,
        *,
        promote: bool,
        cause: str,
        over: str | None = ANY_HEAD,
    ) -> bool:
        """Records a revision with its provenance, judgement and report, and, if ``promote``, makes it the head.

        Of an identical revision that is there already, how it was built stays as recorded; the new judgement is added and counts.
        False, and nothing is recorded, where it was to be the head and that is no longer ``over``.
        Raises ``Damaged`` when the blob is not what the revision's digest says; ``NotFound`` for a parent or signal that the user does
        not have; ``InvalidInput`` for an id or roles that do not fit, and for training on a signal that was pinned for this layer.
        """
        build, files = Build(revision, blob, report, promote, cause), revisions.Files(self._blobs)
        revisions.check(build, files.digest(blob))
        # One turn for file and rows: verify must never find the blob of a revision that is on its way.
        with self._database.writing() as db:
            known_user(db, revision.user)
            if promote and over != ANY_HEAD and over != _head(db, revision.user, revision.layer):
                return False
            revisions.record(db, files, [build], self._now())
            return True

    def add_revisions(
        self,
        given: Iterable[Build],
        *,
        batch: int = 1000,
        progress: Callable[[int], None] = lambda done: None,
    ) -> int:
        """Records many revisions of many users, as ``add_revision`` does; makes the users that are not there.

        What is recorded already is skipped, so that after a kill the same call goes on where it was. Every ``batch`` of them is one
        durable transaction, after which ``progress`` hears how many were gone through; memory does not grow with how many there
        are. Returns how many were added. Raises as ``add_revision``, and ``InvalidId``; the batches before stay.
        """
        files = revisions.Files(self._blobs)
        source, done, added = iter(given), 0, 0
        while some := list(islice(source, batch)):
            for build in some:
                revisions.check(build, files.digest(build.blob))
            with self._database.writing() as db:
                at = self._now()
                hash_chain.ensure_users(db, [build.revision.user for build in some], at)
                for each in revisions.rounds(some):
                    new = [build for build in each if not revisions.is_there(db, build.revision)]
                    revisions.record(db, files, new, at)
                    added += len(new)
            done += len(some)
            progress(done)
        return added

    def judge_again(self, revision: Revision, report: Json, *, move: HeadMove) -> bool:
        """Adds a judgement of a revision that is there, with its report, and moves the head in the same transaction. False, and nothing
        is recorded, where the head is no longer at ``move.before``. Raises ``NotFound``, ``BaseMismatch``, ``Damaged``."""
        with self._database.turn_to_write():
            if move.after is not None and move.after != move.before:
                target = self.revision(move.user, move.after)
                _check_base(target.id, target.base, revision.base)
                self._blobs.read(target.digest)
            with self._database.writing() as db:
                known_layer(db, move.user, move.layer)
                known_id(db, "revision", revision.user, revision.id, layer=revision.layer)
                if _head(db, move.user, move.layer) != move.before:
                    return False
                chains, at = hash_chain.Chains(db), self._now()
                revisions.judge(chains, revision, report, at)
                revisions.move_heads(
                    db, chains, [(move.user, move.layer, move.after, move.cause)], at
                )
                return True

    def add_report(self, user: str, report: Json) -> None:
        """Records a learn that made no revision. Raises ``InvalidInput`` and ``NotFound``."""
        body = hash_chain.as_json(report, what="report")
        with self._database.writing() as db:
            known_user(db, user)
            hash_chain.append(
                db, user, "report", {"at": hash_chain.as_text(self._now()), "body": body}
            )

    def reports(self, user: str) -> tuple[Json, ...]:
        """Oldest first. Raises ``NotFound``."""
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(db, "select body from report where user = ? order by seq", user)
        return tuple(hash_chain.from_json(each["body"]) for each in found)

    def move_head(
        self, user: str, layer: str, to: str | None, *, base: str, cause: str
    ) -> HeadMove:
        """Makes another revision (None: the bare base) the head, a refused one too. Moving to where the head is records nothing, and the
        move that is returned begins where it ends. Raises ``NotFound``, ``BaseMismatch``, ``Damaged``."""
        with self._database.turn_to_write():
            if to is not None:
                with self._database.reading() as db:
                    known_layer(db, user, layer)
                    to = known_id(db, "revision", user, to, layer=layer)
                    (found,) = rows(
                        db, "select digest, base from revision where user = ? and id = ?", user, to
                    )
                _check_base(to, found["base"], base)
                self._blobs.read(found["digest"])
            with self._database.writing() as db:
                known_layer(db, user, layer)
                (moved,) = revisions.move_heads(
                    db, hash_chain.Chains(db), [(user, layer, to, cause)], self._now()
                )
                return moved

    def history(self, user: str, *, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Every move of a head, oldest first. Raises ``NotFound`` for an unknown user or layer."""
        with self._database.reading() as db:
            if layer is None:
                known_user(db, user)
                found = rows(db, "select * from move where user = ? order by seq", user)
            else:
                known_layer(db, user, layer)
                found = rows(
                    db, "select * from move where user = ? and layer = ? order by seq", user, layer
                )
        return tuple(
            HeadMove(
                m["user"],
                m["layer"],
                m["before"],
                m["after"],
                m["cause"],
                hash_chain.as_moment(m["at"]),
            )
            for m in found
        )

    def set_weight(self, user: str, layer: str, weight: float) -> None:
        """How strongly the layer is added from now on. Raises ``NotFound``, and ``InvalidInput`` for a weight that is not finite."""
        if not math.isfinite(weight):
            raise InvalidInput(
                f"The weight {weight} is not a finite number.", hint="Give a number such as 0.5."
            )
        with self._database.writing() as db:
            known_layer(db, user, layer)
            db.execute(
                "update layer set weight = ? where user = ? and name = ?",
                [float(weight), user, layer],
            )

    def set_scope(self, user: str, layer: str, scope: Scope) -> None:
        """When the layer is attached from now on. Raises ``NotFound``, and ``InvalidInput`` for what is no scope."""
        if scope not in get_args(Scope):
            raise InvalidInput(
                f"{scope!a} is no scope.", hint=f"Give one of {', '.join(get_args(Scope))}."
            )
        with self._database.writing() as db:
            known_layer(db, user, layer)
            db.execute(
                "update layer set scope = ? where user = ? and name = ?", [scope, user, layer]
            )

    def pinned(self, user: str, layer: str) -> tuple[str, ...]:
        """Signals held back as questions for this layer for ever, oldest first; none for a layer that is not there yet."""
        with self._database.reading() as db:
            known_user(db, user)
            return revisions.pinned(db, user, layer)

    def considered(self, user: str, layer: str) -> frozenset[str]:
        """Signals in the provenance of any revision of this layer; none for a layer that is not there yet."""
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(
                db,
                "select distinct signal from provenance where user = ? and layer = ?",
                user,
                layer,
            )
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

    def add_vectors(
        self, user: str, embedder: str, vectors: Mapping[str, npt.NDArray[np.float32]]
    ) -> None:
        """Keeps embeddings, in place of older ones. Raises ``NotFound`` for a signal that the user does not have, ``InvalidInput`` for
        what is not one row of finite numbers."""
        for signal, vector in vectors.items():
            if vector.ndim != 1 or vector.size == 0 or not np.isfinite(vector).all():
                raise InvalidInput(
                    f"The vector of {signal} is not one row of finite numbers.",
                    hint="Embed it again.",
                )
        with self._database.writing() as db:
            known_user(db, user)
            for signal, vector in vectors.items():
                db.execute(
                    "insert or replace into vector (user, embedder, signal, data) values (?, ?, ?, ?)",
                    [
                        user,
                        embedder,
                        known_id(db, "signal", user, signal),
                        vector.astype("<f4").tobytes(),
                    ],
                )


def _head(db: sqlite_utils.Database, user: str, layer: str) -> str | None:
    """What is live in a layer, which may not be there yet."""
    found = row(db, "select head from layer where user = ? and name = ?", user, layer)
    return found["head"] if found is not None else None


def _check_base(revision: str, built_on: str, base: str) -> None:
    if built_on != base:
        raise BaseMismatch(
            f"{revision} was built on the base {built_on}, not on {base}.",
            hint="Open the base that it was built on; or, on this one, roll the layer back to the bare base and learn anew.",
        )


def _summary_from(found: Row) -> UserSummary:
    since = hash_chain.as_moment(found["since"])
    return UserSummary(found["id"], since, found["turns"], found["signals"], found["revisions"])


def revision_from(found: Row) -> Revision:
    """A revision from its row, with what was last said of it and its signals by role."""
    return Revision(
        id=found["id"],
        user=found["user"],
        layer=found["layer"],
        digest=found["digest"],
        base=found["base"],
        parent=found["parent"],
        below=tuple(StackEntry(*entry) for entry in hash_chain.from_json(found["below"])),
        recipe=hash_chain.from_json(found["recipe"]),
        inputs=found["inputs"],
        signals=hash_chain.from_json(found["signals"]),
        scores=hash_chain.from_json(found["scores"]),
        verdict=Verdict(found["verdict"]),
        reason=found["reason"],
        probation=bool(found["probation"]),
        at=hash_chain.as_moment(found["at"]),
        seconds=found["seconds"],
    )
