"""The catalog: users, layers, revisions, judgements, heads, reports and cached embeddings.

Invariants: a revision records how it was built and never changes. A verdict is a judgement. A later
judgement is a new row, so a replaced verdict can still be read. A layer's head is the target of its
last move. A signal that is held out for a layer is never trained on in that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from personalpeft.arguments import check_choice, check_number
from personalpeft.errors import BaseMismatch, Damaged, InvalidInput
from personalpeft.ids import check_user_id
from personalpeft.store import revisions, rows
from personalpeft.store.blobs import Blobs
from personalpeft.store.database import Database, Row, fetch_all
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import NewEntry, append_entries, create_user
from personalpeft.store.id_lookup import check_is_text, resolve_id, resolve_layer, resolve_user
from personalpeft.store.types import ANY_HEAD, BuildRecord, UserSummary
from personalpeft.types import HeadMove, Json, Layer, Revision, Scope, Stack, StackEntry

# All columns: a home of an earlier version that is open for reading has no ``trains``.
_SUMMARY = """
select u.*,
    (select count(*) from turn t where t.user = u.id) as turns,
    (select count(*) from signal s where s.user = u.id) as signals,
    (select count(*) from revision r where r.user = u.id) as revisions
from user u
"""

_ORDER = " order by case l.name when 'style' then 0 when 'memory' then 2 else 1 end, l.born"
# All columns: a home of an earlier version that is open for reading has no ``scope``.
_LAYERS = "select l.* from layer l where l.user = ?" + _ORDER

# Read for every request: one range of the index layer_live, and one revision by key for each layer.
_LIVE = (
    "select l.name, l.head, l.weight, r.digest, r.base from layer l"
    " left join revision r on r.user = l.user and r.id = l.head"
    " where l.user = ? and l.head is not null" + _ORDER
)

_REVISIONS = """
select r.*, j.verdict, j.reason, j.probation, j.scores, (
    select json_group_object(p.signal, p.role) from provenance p
    where p.user = r.user and p.revision = r.id
) as signals
from revision r join judgement j on j.user = r.user and j.revision = r.id
where j.seq = (select max(seq) from judgement where user = r.user and revision = r.id)
    and r.user = ?
"""

_USERS_AT_ONCE = 500
# A skill that was taught can be given a scope before it is built.
_ADD_TAUGHT_LAYER = """
insert into layer (user, name, born)
select ?1, ?2, (select count(*) from layer where user = ?1) where exists (
    select 1 from signal where user = ?1 and kind = 'demonstration'
    and 'skill.' || json_extract(payload, '$.skill') = ?2
) on conflict do nothing
"""

_VECTORS = """
select v.signal, v.data from vector v join signal s on s.user = v.user and s.id = v.signal
where v.user = ? and v.embedder = ? order by s.seq
"""


class Catalog:
    """The catalog of all users. Lookups accept a unique prefix of an id and raise ``NotFound``."""

    def __init__(self, database: Database, blobs: Blobs, *, now: Callable[[], datetime]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    def ensure_user(self, user: str) -> None:
        """Create a user unless it exists. Raises ``InvalidId``."""
        check_user_id(user)
        # Nearly every user exists, and a read does not wait for a writer.
        if self._database.fetch_one("select 1 from user where id = ?", user):
            return
        with self._database.write_transaction() as db:
            create_user(db, user, self._now())

    def users(
        self, *, after: str | None = None, limit: int = 100, search: str = ""
    ) -> tuple[UserSummary, ...]:
        """Return a page of users by id. A page shorter than ``limit`` is the last.

        Args:
            after: The page begins after this id, which need not exist.
            limit: The most users to return, at least 1.
            search: Only users whose id contains this text.

        Raises:
            InvalidInput: The limit is below 1.
            InvalidId: ``after`` is not a user id.
        """
        check_number("limit", limit, 1, whole=True)
        check_is_text(search, "search text")
        start = "" if after is None else check_user_id(after)
        if not search.isascii():
            return ()
        sql = _SUMMARY + " where u.id > ? and instr(u.id, ?) order by u.id limit ?"
        found = self._database.fetch_all(sql, start, search, limit)
        return tuple(map(rows.decode_summary, found))

    def iter_users(self) -> Iterator[UserSummary]:
        """Yield all users by id. Users may be made and forgotten meanwhile."""
        after = None
        while page := self.users(after=after, limit=_USERS_AT_ONCE):
            yield from page
            after = page[-1].id

    def user(self, user: str) -> UserSummary:
        """Return one user's summary. Raises ``NotFound``."""
        (row,) = self._fetch(_SUMMARY + " where u.id = ?", user)
        return rows.decode_summary(row)

    def allows_training(self, user: str) -> bool:
        """Return whether layers may be trained on a user's new signals. Raises ``NotFound``."""
        (row,) = self._fetch("select * from user where id = ?", user)
        return bool(row.get("trains", True))

    def set_training(self, user: str, allowed: bool) -> None:
        """Set whether layers may be trained on a user's new signals. Raises ``NotFound``."""
        with self._database.write_transaction() as db:
            resolve_user(db, user)
            db.execute("update user set trains = ? where id = ?", [int(allowed), user])

    def layers(self, user: str) -> tuple[Layer, ...]:
        """Return a user's layers, lowest first: style, skills by age, memory."""
        found = self._fetch(_LAYERS, user)
        return tuple(rows.decode_layer(row, position) for position, row in enumerate(found))

    def stack(self, user: str, base: str) -> Stack:
        """Return the live stack on a base: one entry for each layer with a head.

        Raises ``BaseMismatch`` if a head was built on another base, ``Damaged`` if it is missing.
        """
        with self._database.read_transaction() as db:
            live = fetch_all(db, _LIVE, user) if user.isascii() else []
            if not live:
                resolve_user(db, user)
        for row in live:
            if row["digest"] is None:
                raise Damaged(
                    f"{row['head']}, the head of {row['name']}, is missing.",
                    hint="Run verify for details; roll the layer back to another revision.",
                )
            _check_base(row["head"], row["base"], base)
        entries = (StackEntry(r["name"], r["head"], r["digest"], r["weight"]) for r in live)
        return Stack(base, tuple(entries))

    def revision(self, user: str, revision_id: str) -> Revision:
        """Return one revision by a unique prefix of its id or digest."""
        with self._database.read_transaction() as db:
            wanted = resolve_id(db, "revision", user, revision_id)
            (row,) = fetch_all(db, _REVISIONS + " and r.id = ?", user, wanted)
        return rows.decode_revision(row)

    def revisions(self, user: str, *, layer: str | None = None) -> tuple[Revision, ...]:
        """Return the revisions of a user or a layer, also refused ones, oldest first."""
        sql = _REVISIONS + (
            " order by r.seq" if layer is None else " and r.layer = ? order by r.seq"
        )
        return tuple(map(rows.decode_revision, self._fetch(sql, user, layer=layer)))

    def build_record(self, user: str, revision_id: str) -> BuildRecord:
        """Return what is recorded of a revision's build, by a unique prefix of its id."""
        with self._database.read_transaction() as db:
            wanted = resolve_id(db, "revision", user, revision_id)
            return revisions.read_build_record(db, user, wanted)

    def add_revision(
        self,
        revision: Revision,
        blob: bytes,
        report: Json,
        *,
        promote: bool,
        cause: str,
        expected_head: str | None = ANY_HEAD,
    ) -> bool:
        """Store the blob, and in one transaction record the revision and move the head.

        A revision that is recorded already keeps its build; the new judgement is added and counts.

        Args:
            revision: The revision, with its judgement and its signals by role.
            blob: Its packed file.
            report: The report of its learn.
            promote: Whether it becomes the head.
            cause: The cause of that move.
            expected_head: Promote only if this is the head now (None: the base).

        Returns:
            False if another head is live than expected; then nothing is recorded.

        Raises:
            Damaged: The blob does not match the revision's digest.
            NotFound: The user does not have the parent or a signal.
            InvalidInput: An id or role is invalid, or a held-out signal was trained on.
        """
        revisions.check_revision(revision, blob)
        # File and rows under one lock: verify must never find the blob of a revision on its way.
        with self._database.write_transaction() as db:
            resolve_user(db, revision.user)
            head = revisions.read_head(db, revision.user, revision.layer)
            if promote and expected_head not in (ANY_HEAD, head):
                return False
            revisions.record_revision(
                db, revision, report, promote=promote, cause=cause, at=self._now()
            )
            self._blobs.put(revision.user, blob)
            return True

    def add_report(self, user: str, report: Json) -> None:
        """Record the report of a learn that built no revision."""
        with self._database.write_transaction() as db:
            resolve_user(db, user)
            row = rows.encode("report", at=self._now(), body=report)
            append_entries(db, user, [NewEntry("report", row)])

    def reports(self, user: str) -> tuple[Json, ...]:
        """Return a user's reports, oldest first."""
        found = self._fetch("select body from report where user = ? order by seq", user)
        return tuple(rows.decode_report(row["body"]) for row in found)

    def move_head(
        self, user: str, layer: str, to: str | None, *, base: str, cause: str
    ) -> HeadMove:
        """Make another revision the head (None: the bare base), also a refused one.

        Args:
            user: The user's id.
            layer: The layer's name.
            to: The new head by a unique prefix.
            base: The digest of the open base.
            cause: Why; it is recorded.

        Returns:
            The move. A move to the present head is not recorded.

        Raises:
            NotFound: The layer or the revision does not exist.
            BaseMismatch: The revision was built on another base.
            Damaged: The revision's blob is missing or damaged.
        """
        with self._database.write_transaction() as db:
            resolve_layer(db, user, layer)
            if to is not None:
                to = self._check_target(db, user, layer, to, base)
                _check_same_base(db, user, layer, to, base)
            return revisions.move_head(db, user, layer, to, cause=cause, at=self._now())

    def switch_heads(
        self,
        user: str,
        heads: Mapping[str, str | None],
        *,
        expected: Mapping[str, str | None],
        judged: Iterable[tuple[Revision, Json]],
        base: str,
        cause: str,
    ) -> bool:
        """Judge revisions and move the heads of several layers, in one transaction.

        Args:
            user: The user's id.
            heads: The new head of each layer (None: the bare base); empty to move none.
            expected: The heads as they must be now.
            judged: Recorded revisions with a new judgement, and the report of each.
            base: The digest of the base of the new heads.
            cause: The cause of the moves.

        Returns:
            False if a head is another than expected; then nothing is recorded.

        Raises:
            NotFound, BaseMismatch, Damaged: As ``move_head``.
        """
        with self._database.write_transaction() as db:
            resolve_user(db, user)
            heads_now = {layer: revisions.read_head(db, user, layer) for layer in expected}
            if heads_now != expected:
                return False
            at = self._now()
            targets = dict(heads)
            for layer, to in heads.items():
                if to not in (None, expected.get(layer)):
                    targets[layer] = self._check_target(db, user, layer, to, base)
            for revision, report in judged:
                resolve_id(db, "revision", user, revision.id, layer=revision.layer)
                revisions.record_judgement(db, revision, report, at)
            for layer, to in targets.items():
                revisions.move_head(db, user, layer, to, cause=cause, at=at)
            return True

    def head_moves(self, user: str, *, layer: str | None = None) -> tuple[HeadMove, ...]:
        """Return every move of a user's heads, or of one layer's, oldest first."""
        condition = "" if layer is None else " and layer = ?"
        sql = f"select * from move where user = ?{condition} order by seq"
        return tuple(map(rows.decode_move, self._fetch(sql, user, layer=layer)))

    def set_weight(self, user: str, layer: str, weight: float) -> None:
        """Set how strongly a layer is added, from -2 to 2. 1 adds it as trained.

        Raises ``NotFound``, ``InvalidInput``.
        """
        check_number("weight", weight, -2, 2)
        self._update_layer(user, layer, "weight", float(weight))

    def set_scope(self, user: str, layer: str, scope: Scope) -> None:
        """Set when a layer is attached: "always" (the style's default), "near" (that of others) or
        "never".

        Raises ``InvalidInput``, and ``NotFound`` for a layer that was neither built nor taught.
        """
        check_choice("scope", scope, Scope)
        check_is_text(layer, "layer")
        if layer.isascii():
            with self._database.write_transaction() as db:
                db.execute(_ADD_TAUGHT_LAYER, [user, layer])
        self._update_layer(user, layer, "scope", scope)

    def holdout(self, user: str, layer: str) -> tuple[str, ...]:
        """Return the signals that are held out for a layer for ever, oldest first."""
        with self._database.read_transaction() as db:
            resolve_user(db, user)
            return revisions.read_holdout(db, user, layer)

    def used_signals(self, user: str, layer: str) -> frozenset[str]:
        """Return the signals that any revision of a layer trained on or held out."""
        sql = "select distinct signal from provenance where user = ? and layer = ?"
        return frozenset(row["signal"] for row in self._fetch(sql, user, layer))

    def vectors(self, user: str, embedder: str) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return cached embeddings by signal, oldest first: read-only vectors ``[size]``."""
        found = self._fetch(_VECTORS, user, embedder)
        return {row["signal"]: np.frombuffer(row["data"], dtype="<f4") for row in found}

    def add_vectors(
        self, user: str, embedder: str, vectors: Mapping[str, npt.NDArray[np.float32]]
    ) -> None:
        """Cache embeddings of signals, one vector ``[size]`` each, in place of earlier ones.

        Raises ``NotFound`` for a signal, and ``InvalidInput`` for a vector that is empty, not
        finite, or has another shape.
        """
        for signal, vector in vectors.items():
            if vector.ndim != 1 or vector.size == 0 or not np.isfinite(vector).all():
                raise InvalidInput(
                    f"The vector of {signal} must be one row of finite numbers.",
                    hint="Embed the text again.",
                )
        with self._database.write_transaction() as db:
            resolve_user(db, user)
            sql = "insert or replace into vector (user, embedder, signal, data) values (?, ?, ?, ?)"
            for signal, vector in vectors.items():
                signal_id, data = resolve_id(db, "signal", user, signal), vector.astype("<f4")
                db.execute(sql, [user, embedder, signal_id, data.tobytes()])

    def _fetch(self, sql: str, user: str, *parameters: Any, layer: str | None = None) -> list[Row]:
        """Return the rows of a query about an existing user or layer."""
        with self._database.read_transaction() as db:
            if layer is None:
                resolve_user(db, user)
                return fetch_all(db, sql, user, *parameters)
            return fetch_all(db, sql, user, resolve_layer(db, user, layer))

    def _check_target(
        self, db: sqlite3.Connection, user: str, layer: str, prefix: str, base: str
    ) -> str:
        """Return the full id of a revision that may become the head."""
        revision = resolve_id(db, "revision", user, prefix, layer=layer)
        sql = "select digest, base from revision where user = ? and id = ?"
        (row,) = fetch_all(db, sql, user, revision)
        _check_base(revision, row["base"], base)
        self._blobs.read(row["digest"])
        return revision

    def _update_layer(self, user: str, layer: str, column: str, value: str | float) -> None:
        with self._database.write_transaction() as db:
            resolve_layer(db, user, layer)
            db.execute(
                f"update layer set {column} = ? where user = ? and name = ?", [value, user, layer]
            )


def _check_same_base(
    db: sqlite3.Connection, user: str, layer: str, revision: str, base: str
) -> None:
    """Raise ``BaseMismatch`` if a head moves to a base that is not that of the other heads.

    No base could answer with such a stack.
    """
    sql = (
        "select l.name, r.base from layer l"
        " join revision r on r.user = l.user and r.id = l.head where l.user = ?"
    )
    heads = {row["name"]: row["base"] for row in fetch_all(db, sql, user)}
    others = [name for name, built_on in heads.items() if name != layer and built_on != base]
    if others and heads.get(layer) != base:
        raise BaseMismatch(
            f"{revision} was built on another base than the live revision of {others[0]}.",
            hint="Move all layers at once: personalpeft rebase --to NAME",
        )


def _check_base(revision: str, built_on: str, base: str) -> None:
    if built_on != base:
        raise BaseMismatch(
            f"{revision} was built on the base {built_on}, not on {base}.",
            hint="Open that base; or build the layers anew on another: personalpeft rebase --to NAME",
        )
