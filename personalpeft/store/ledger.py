"""The ledger: turns, signals, and retractions of signals.

Invariants:

- Rows are only added. At most one other signal of the same kind supersedes a signal. If the kind is
  about a turn, both are about the same turn.
- Of one turn, source and kind only the newest signal is current. Comments add up, since two rules
  can both hold. A signal supersedes another source's only by name.
- A superseded or retracted signal stays disabled, also when its successor is retracted. One whose
  training was retracted stays current, and its payload then says so.
- A reply that began before its user erased something is rejected. It may repeat the erased text,
  and a later erasure would not find it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TypeAlias

from personalpeft.arguments import check_number
from personalpeft.errors import Forgotten, InvalidInput
from personalpeft.ids import new_id
from personalpeft.store import rows
from personalpeft.store.database import Database, fetch_all, fetch_one
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import NewEntry, append_entries, create_user
from personalpeft.store.id_lookup import resolve_id, resolve_user
from personalpeft.store.types import ConversationLink, ErasureMark
from personalpeft.types import (
    FinishReason,
    Json,
    Message,
    Sampling,
    Signal,
    SignalKind,
    Stack,
    Turn,
    Usage,
)

_ABOUT_A_TURN = frozenset(SignalKind) - {SignalKind.FACT, SignalKind.DEMONSTRATION}
_NEWEST_COUNTS = _ABOUT_A_TURN - {SignalKind.COMMENT}

# The first part is worded as in the index turn_looked_up, without which SQLite would read all
# turns.
_USING = (
    " and used <> '[]' and exists"
    " (select 1 from json_each(used) where value in (select value from json_each(?)))"
)
_TRAINING = "training"
_OLDER = " and seq < (select seq from turn where user = ? and id = ?)"
# Each ends where a condition on the number of the entry may follow.
_SUPERSEDED = "select 1 from signal n where n.user = s.user and n.supersedes = s.id"
_RETRACTION = "select 1 from retraction r where r.user = s.user and r.signal = s.id"


SignalsMark: TypeAlias = tuple[str | None, int, int]


class Ledger:
    """The ledger of all users. Lookups accept a unique prefix of an id and raise ``NotFound``."""

    def __init__(
        self, database: Database, *, now: Callable[[], datetime], entropy: Callable[[int], bytes]
    ) -> None:
        self._database = database
        self._now = now
        self._entropy = entropy

    def new_turn_id(self) -> str:
        """Return an id for a turn that begins now. Nothing is stored yet."""
        return new_id("t", self._now(), self._entropy)

    def add_turn(
        self,
        user: str,
        *,
        turn_id: str | None = None,
        messages: Sequence[Message],
        reply: str,
        stack: Stack,
        sampling: Sampling,
        usage: Usage,
        finish_reason: FinishReason,
        used: Sequence[str] = (),
        erasure_mark: ErasureMark | None = None,
        conversation_id: str | None = None,
        previous: str | None = None,
        backend: str | None = None,
        backend_reason: str | None = None,
    ) -> Turn:
        """Append one turn and create the user if needed.

        Args:
            user: The user's id.
            turn_id: The turn's id, from ``new_turn_id``; None makes one.
            messages: The conversation, as the app sent it.
            reply: The text of the reply.
            stack: What produced it.
            sampling: How its tokens were sampled.
            usage: The tokens read and written.
            finish_reason: Why it ended.
            used: The signals (rules, facts) in its prompt.
            erasure_mark: What ``erasure_mark`` returned when the reply began.
            conversation_id: The conversation. None starts one; "" is for a turn without one.
            previous: The turn that this one continues.
            backend: The backend that generated the reply.
            backend_reason: Why that backend served.

        Raises:
            InvalidId: The user id is invalid.
            InvalidInput: A value is not valid JSON or Unicode.
            Forgotten: The user has erased something since the reply began.
        """
        with self._database.write_transaction() as db:
            at = self._now()
            _check_not_erased_since(db, user, erasure_mark)
            create_user(db, user, at)
            turn_id = turn_id or self.new_turn_id()
            turn = Turn(
                id=turn_id,
                user=user,
                at=at,
                messages=tuple(messages),
                reply=reply,
                stack=stack,
                sampling=sampling,
                usage=usage,
                finish_reason=finish_reason,
                used=tuple(used),
                conversation_id=turn_id if conversation_id is None else conversation_id,
                previous=previous,
                backend=backend,
                backend_reason=backend_reason,
            )
            row = rows.encode_turn(turn)
            append_entries(db, user, [NewEntry("turn", row)])
            # From the row, so that it equals what a later read returns.
            return rows.decode_turn({**row, "user": user})

    def erasure_mark(self, user: str) -> ErasureMark | None:
        """Return what was erased of a user so far, or None for an unknown user.

        Call it before reading anything of the user for a reply.
        """
        with self._database.read_transaction() as db:
            return _read_erasure_mark(db, user)

    def turn(self, user: str, turn_id: str) -> Turn:
        """Return one turn. Raises ``NotFound``, ``InvalidInput`` for an ambiguous prefix."""
        with self._database.read_transaction() as db:
            wanted = resolve_id(db, "turn", user, turn_id)
            (row,) = fetch_all(db, "select * from turn where user = ? and id = ?", user, wanted)
        return rows.decode_turn(row)

    def turns(
        self,
        user: str,
        *,
        limit: int | None = None,
        using: Collection[str] | None = None,
        before: str | None = None,
        until: int | None = None,
    ) -> tuple[Turn, ...]:
        """Return turns, newest first.

        Args:
            user: The user's id.
            limit: The most turns to return.
            using: Only turns with one of these signals in their prompt.
            before: Only turns older than this one.
            until: As for ``signals``.

        Raises:
            NotFound: The user or the turn ``before`` does not exist.
            InvalidInput: The limit is negative.
        """
        if limit is not None:
            check_number("limit", limit, 0, whole=True)
        sql, parameters = "select * from turn where user = ?", [user]
        if using is not None:
            sql += _USING
            parameters.append(rows.to_json(sorted(using), what="list of signals"))
        with self._database.read_transaction() as db:
            resolve_user(db, user)
            if before is not None:
                sql += _OLDER
                parameters += [user, resolve_id(db, "turn", user, before)]
            sql += f"{_older_than('seq', until)} order by seq desc limit ?"
            found = fetch_all(db, sql, *parameters, -1 if limit is None else limit)
        return tuple(map(rows.decode_turn, found))

    def continued(
        self, user: str, turns: Collection[str], *, until: int | None = None
    ) -> frozenset[str]:
        """Return which of some turns another turn continues. ``until`` is as for ``signals``."""
        sql = "select distinct previous from turn where user = ? and previous in "
        sql += f"(select value from json_each(?)){_older_than('seq', until)}"
        wanted = rows.to_json(sorted(turns), what="list of turns")
        with self._database.read_transaction() as db:
            # As in ``conversation_links``.
            found = fetch_all(db, sql, user, wanted) if _has_column(db, "turn", "previous") else ()
        return frozenset(row["previous"] for row in found)

    def turns_with_reply(self, user: str, text: str) -> tuple[Turn, ...]:
        """Return the turns whose reply, or an edit of it, is a text, newest first.

        Returns nothing for an unknown user.
        """
        sql = (
            "select * from turn where user = ?1 and id in (select id from turn where user = ?1"
            " and substr(reply, 1, 40) = substr(?2, 1, 40) and reply = ?2 union"
            " select turn from signal where user = ?1 and kind = 'edit'"
            " and json_extract(payload, '$.text') = ?2) order by seq desc"
        )
        return tuple(map(rows.decode_turn, self._database.fetch_all(sql, user, text)))

    def conversation_links(self, user: str) -> tuple[ConversationLink, ...]:
        """Return the place of each turn in its conversation, oldest first. Raises ``NotFound``."""
        with self._database.read_transaction() as db:
            resolve_user(db, user)
            # A home of an earlier version that is open for reading has no such columns.
            columns = ", ".join(
                name if _has_column(db, "turn", name) else f"null as {name}"
                for name in ("conversation", "previous")
            )
            sql = f"select id as turn, at, {columns} from turn where user = ? order by seq"
            found = fetch_all(db, sql, user)
        return tuple(ConversationLink(**{**row, "at": rows.parse_time(row["at"])}) for row in found)

    def add_signal(
        self,
        user: str,
        kind: SignalKind,
        payload: Json,
        *,
        turn: str | None = None,
        source: str = "person",
        supersedes: str | None = None,
        erasure_mark: ErasureMark | None = None,
    ) -> Signal:
        """Append one signal and create the user if needed.

        Args:
            user: The user's id.
            kind: What kind of feedback it is.
            payload: Its content; see ``Signal``.
            turn: The turn that it is about.
            source: Who gave it.
            supersedes: The signal that it replaces. By default the current one of the same turn,
                kind and source, except for comments.
            erasure_mark: As for ``add_turn``.

        Raises:
            InvalidId: The user id is invalid.
            InvalidInput: The payload is not valid JSON, or the signal cannot be superseded.
            NotFound: The user does not have the turn or the superseded signal.
            Forgotten: As ``add_turn``.
        """
        with self._database.write_transaction() as db:
            at = self._now()
            _check_not_erased_since(db, user, erasure_mark)
            create_user(db, user, at)
            if turn is not None:
                turn = resolve_id(db, "turn", user, turn)
            if supersedes is not None:
                supersedes = _check_supersedes(db, user, kind, turn, supersedes)
            elif kind in _NEWEST_COUNTS and turn is not None:
                supersedes = _current_on_turn(db, user, kind, turn, source)
            signal_id = new_id("s", at, self._entropy)
            signal = Signal(signal_id, user, kind, at, payload, turn, source, supersedes)
            row = rows.encode("signal", signal)
            append_entries(db, user, [NewEntry("signal", row)])
            return rows.decode_signal({**row, "user": user})

    def add_signals(
        self, user: str, kind: SignalKind, payloads: Sequence[Json], *, source: str = "person"
    ) -> tuple[str, ...]:
        """Append signals that are about no turn, all or none, and return their ids.

        Args:
            user: The user's id; the user is created if needed.
            kind: The kind of all of them.
            payloads: The content of each; see ``Signal``.
            source: Who gave them.

        Raises:
            InvalidId: The user id is invalid.
            InvalidInput: A payload is not valid JSON.
        """
        with self._database.write_transaction() as db:
            at = self._now()
            create_user(db, user, at)
            signals = [
                Signal(new_id("s", at, self._entropy), user, kind, at, payload, None, source)
                for payload in payloads
            ]
            entries = [NewEntry("signal", rows.encode("signal", signal)) for signal in signals]
            append_entries(db, user, entries)
        return tuple(signal.id for signal in signals)

    def signal(self, user: str, signal_id: str) -> Signal:
        """Return one signal. Raises ``NotFound``, ``InvalidInput`` for an ambiguous prefix."""
        with self._database.read_transaction() as db:
            return _read_signal(db, user, signal_id)

    def signals(
        self,
        user: str,
        *,
        kinds: Sequence[SignalKind] | None = None,
        turn: str | None = None,
        current: bool = True,
        until: int | None = None,
    ) -> tuple[Signal, ...]:
        """Return signals, oldest first.

        Args:
            user: The user's id.
            kinds: Only signals of these kinds.
            turn: Only signals about this turn.
            current: Leave out superseded and retracted ones.
            until: The ledger as it was before the entry of this number; see
                ``Catalog.build_record``.

        Raises:
            NotFound: There is no such user.
        """
        wanted = [str(kind) for kind in (SignalKind if kinds is None else kinds)]
        marks = ", ".join("?" * len(wanted))
        parameters = [user, *wanted]
        with self._database.read_transaction() as db:
            resolve_user(db, user)
            sql = f"{_select_signals(db, until)} where s.user = ? and s.kind in ({marks})"
            sql += _older_than("s.seq", until)
            if current:
                sql += _is_current(db, until)
            if turn is not None:
                sql += " and s.turn = ?"
                parameters.append(turn)
            found = fetch_all(db, sql + " order by s.seq", *parameters)
        return tuple(map(rows.decode_signal, found))

    def signals_mark(self, user: str) -> SignalsMark:
        """Return a value that changes with each signal that is added, retracted or erased.

        Raises ``NotFound``.
        """
        sql = (
            "select (select id from signal where user = ?1 order by seq desc limit 1) as newest,"
            " (select count(*) from signal where user = ?1) as signals,"
            " (select count(*) from retraction where user = ?1) as retractions"
        )
        with self._database.read_transaction() as db:
            resolve_user(db, user)
            (row,) = fetch_all(db, sql, user)
        return row["newest"], row["signals"], row["retractions"]

    def facts_with_text(self, user: str, text: str) -> tuple[Signal, ...]:
        """Return the current facts with a text, oldest first; nothing for an unknown user."""
        with self._database.read_transaction() as db:
            sql = (
                f"{_select_signals(db)} where s.user = ? and s.kind = 'fact'"
                f" and json_extract(s.payload, '$.text') = ?{_is_current(db)} order by s.seq"
            )
            found = fetch_all(db, sql, user, text)
        return tuple(map(rows.decode_signal, found))

    def retract(self, user: str, *signals: str, training_only: bool = False) -> None:
        """Disable signals, all or none, or with ``training_only`` withdraw them from training.

        A second retraction records nothing. Raises ``NotFound``.
        """
        purpose = _TRAINING if training_only else None
        sql = "select 1 from retraction where user = ? and signal = ? and purpose is ?"
        with self._database.write_transaction() as db:
            for signal in {resolve_id(db, "signal", user, each): None for each in signals}:
                if fetch_one(db, sql, user, signal, purpose) is None:
                    row = rows.encode("retraction", signal=signal, at=self._now(), purpose=purpose)
                    append_entries(db, user, [NewEntry("retraction", row)])


def _read_erasure_mark(db: sqlite3.Connection, user: str) -> ErasureMark | None:
    sql = (
        "select since, (select count(*) from tombstone t where t.user = u.id) as tombstones"
        " from user u where id = ?"
    )
    row = fetch_one(db, sql, user)
    return None if row is None else ErasureMark(row["since"], row["tombstones"])


def _check_not_erased_since(db: sqlite3.Connection, user: str, mark: ErasureMark | None) -> None:
    """Raise ``Forgotten`` if something of the user, or the user, was erased since the mark."""
    if mark is not None and _read_erasure_mark(db, user) != mark:
        raise Forgotten(
            "Something was forgotten while this reply was generated, so the reply is not kept.",
            hint="Ask again.",
        )


def _check_supersedes(
    db: sqlite3.Connection, user: str, kind: SignalKind, turn: str | None, signal_id: str
) -> str:
    """Return the full id of a signal that a new one may supersede."""
    older = _read_signal(db, user, signal_id)
    if older.kind != kind:
        raise InvalidInput(
            f"A {kind} cannot supersede {older.id}, which is a {older.kind}.",
            hint=f"Retract {older.id} instead, and add the {kind} by itself.",
        )
    if kind in _ABOUT_A_TURN and older.turn != turn:
        raise InvalidInput(
            f"{older.id} is about {older.turn or 'no turn'}, not about {turn or 'no turn'}.",
            hint="Supersede a signal with one on the same turn.",
        )
    sql = "select id from signal where user = ? and supersedes = ?"
    if (newer := fetch_one(db, sql, user, older.id)) is not None:
        raise InvalidInput(
            f"{older.id} is superseded already.", hint=f"Supersede {newer['id']} instead."
        )
    return older.id


def _current_on_turn(
    db: sqlite3.Connection, user: str, kind: SignalKind, turn: str, source: str
) -> str | None:
    # In homes of an earlier version one source may have superseded another, so a source's newest
    # may be disabled.
    sql = (
        "select s.id from signal s where s.user = ? and s.turn = ? and s.kind = ? and s.source = ?"
        f" and not exists ({_SUPERSEDED}) order by s.seq desc limit 1"
    )
    newest = fetch_one(db, sql, user, turn, str(kind), source)
    return newest["id"] if newest else None


def _read_signal(db: sqlite3.Connection, user: str, signal_id: str) -> Signal:
    wanted = resolve_id(db, "signal", user, signal_id)
    sql = f"{_select_signals(db)} where s.user = ? and s.id = ?"
    (row,) = fetch_all(db, sql, user, wanted)
    return rows.decode_signal(row)


def _older_than(column: str, until: int | None) -> str:
    """Return the condition that an entry precedes the entry ``until``."""
    return "" if until is None else f" and {column} < {until:d}"


def _select_signals(db: sqlite3.Connection, until: int | None = None) -> str:
    """Return the query of all signals ``s``, marked where their training was retracted."""
    mark = f"exists ({_RETRACTION}{_of_purpose(db, _TRAINING)}{_older_than('r.seq', until)})"
    return f"select s.*, {mark} as is_training_retracted from signal s"


def _is_current(db: sqlite3.Connection, until: int | None = None) -> str:
    """Return the condition that a signal ``s`` is neither superseded nor retracted."""
    superseded = f"{_SUPERSEDED}{_older_than('n.seq', until)}"
    retracted = f"{_RETRACTION}{_of_purpose(db, None)}{_older_than('r.seq', until)}"
    return f" and not exists ({superseded}) and not exists ({retracted})"


def _of_purpose(db: sqlite3.Connection, purpose: str | None) -> str:
    """Return the condition on the purpose of a retraction ``r``."""
    if not _has_column(db, "retraction", "purpose"):
        # In a home of an earlier version that is open for reading, every retraction is whole.
        return "" if purpose is None else " and false"
    return " and r.purpose is null" if purpose is None else f" and r.purpose = '{purpose}'"


def _has_column(db: sqlite3.Connection, table: str, name: str) -> bool:
    """Return whether a table has a column. A home of an earlier version may lack it."""
    return any(column["name"] == name for column in fetch_all(db, f"pragma table_info({table})"))
