"""What was said: turns, signals, and retractions of signals.

Invariants: rows are only added. A signal is superseded by at most one other, of its own kind, and where the kind speaks about a turn, on
the same turn. What one source says of one turn in one kind is a line whose newest is the one that counts; only comments add up, since
two rules can both hold. Nobody supersedes another's word unless by name: what an app saw is no reason to drop what a person said. What was
superseded or retracted stays off: taking back the newer opinion does not bring back the older one, which its author had given up too.
A reply that was begun before its user forgot something is refused afterwards: it may repeat that, and no later forgetting looks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

import sqlite_utils

from personalpeft.errors import Forgotten, InvalidInput
from personalpeft.ids import new_id
from personalpeft.store import hash_chain
from personalpeft.store.database import Database, Row, row, rows
from personalpeft.store.id_lookup import known_id, known_user
from personalpeft.types import (
    FinishReason,
    Json,
    Message,
    Sampling,
    Signal,
    SignalKind,
    Stack,
    StackEntry,
    Turn,
    Usage,
)

_ABOUT_A_TURN = frozenset(
    {
        SignalKind.RATING,
        SignalKind.EDIT,
        SignalKind.PREFERENCE,
        SignalKind.COMMENT,
        SignalKind.REWARD,
    }
)
_LATER_COUNTS = _ABOUT_A_TURN - {SignalKind.COMMENT}

# Its first part is in the words of the index turn_looked_up, without which it would walk over all turns of the user.
_USING = " and used <> '[]' and exists (select 1 from json_each(used) where value in (select value from json_each(?)))"

_OLDER = " and seq < (select seq from turn where user = ? and id = ?)"


class SqliteLedger:
    """The ``Ledger`` of a home."""

    def __init__(
        self, database: Database, *, now: Callable[[], datetime], entropy: Callable[[int], bytes]
    ) -> None:
        self._database = database
        self._now = now
        self._entropy = entropy

    def add_turn(
        self,
        user: str,
        *,
        messages: Sequence[Message],
        reply: str,
        stack: Stack,
        sampling: Sampling,
        usage: Usage,
        finish_reason: FinishReason,
        used: Sequence[str] = (),
        removed: int | None = None,
    ) -> Turn:
        """Appends one turn, and makes the user on first use. ``removed`` is what ``count_removed`` returned when the reply was begun.
        Raises ``InvalidId`` and ``InvalidInput``, and ``Forgotten`` where the user has forgotten something since."""
        content = {
            "messages": hash_chain.as_json(
                [message.plain() for message in messages], what="messages"
            ),
            "reply": reply,
            "stack": hash_chain.as_json(
                {
                    "base": stack.base,
                    "entries": [[e.layer, e.revision, e.digest, e.weight] for e in stack.entries],
                },
                what="stack",
            ),
            "sampling": hash_chain.as_json(
                {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "max_tokens": sampling.max_tokens,
                    "seed": sampling.seed,
                    "stop": list(sampling.stop),
                },
                what="sampling",
            ),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reason": finish_reason,
            "used": hash_chain.as_json(list(used), what="list of signals used"),
        }
        with self._database.writing() as db:
            at = self._now()
            hash_chain.ensure_users(db, [user], at)
            _check_removed(db, user, removed)
            turn_id = new_id("t", at, self._entropy)
            hash_chain.append(
                db, user, "turn", {"id": turn_id, "at": hash_chain.as_text(at), **content}
            )
            return _turn(db, user, turn_id)

    def count_removed(self, user: str) -> int:
        """Return how many entries of a user were forgotten. Read it before anything of the user is read for a reply."""
        with self._database.reading() as db:
            return _count_removed(db, user)

    def turn(self, user: str, turn_id: str) -> Turn:
        """One turn. Raises ``NotFound``, and ``InvalidInput`` for an ambiguous prefix."""
        with self._database.reading() as db:
            return _turn(db, user, known_id(db, "turn", user, turn_id))

    def turns(
        self,
        user: str,
        *,
        limit: int | None = None,
        using: Collection[str] | None = None,
        before: str | None = None,
    ) -> tuple[Turn, ...]:
        """Newest first; with ``using`` only those in whose prompt one of these signals was, with ``before`` only those that are older
        than this turn. Raises as ``turn`` for that.
        """
        if limit is not None and limit < 0:
            raise InvalidInput(
                f"The limit {limit} is negative.", hint="Give 0 or more, or none for all."
            )
        with self._database.reading() as db:
            known_user(db, user)
            older = [] if before is None else [user, known_id(db, "turn", user, before)]
            found = rows(
                db,
                f"select * from turn where user = ?{'' if using is None else _USING}{_OLDER if older else ''}"
                " order by seq desc limit ?",
                user,
                *(
                    []
                    if using is None
                    else [hash_chain.as_json(sorted(using), what="list of signals used")]
                ),
                *older,
                -1 if limit is None else limit,
            )
        return tuple(turn_from(each) for each in found)

    def add_signal(
        self,
        user: str,
        kind: SignalKind,
        payload: Json,
        *,
        turn: str | None = None,
        source: str = "person",
        supersedes: str | None = None,
        removed: int | None = None,
    ) -> Signal:
        """Appends one signal, and makes the user on first use. Raises ``InvalidId``, ``InvalidInput``, ``NotFound`` for a turn or
        superseded signal that this user does not have, and ``Forgotten`` as ``add_turn``."""
        text = hash_chain.as_json(payload, what="payload")
        with self._database.writing() as db:
            at = self._now()
            hash_chain.ensure_users(db, [user], at)
            _check_removed(db, user, removed)
            if turn is not None:
                turn = known_id(db, "turn", user, turn)
            if supersedes is not None:
                supersedes = _supersedable(db, user, kind, turn, supersedes)
            elif kind in _LATER_COUNTS and turn is not None:
                supersedes = _newest_on_turn(db, user, kind, turn, source)
            signal_id = new_id("s", at, self._entropy)
            hash_chain.append(
                db,
                user,
                "signal",
                {
                    "id": signal_id,
                    "kind": str(kind),
                    "at": hash_chain.as_text(at),
                    "payload": text,
                    "turn": turn,
                    "source": source,
                    "supersedes": supersedes,
                },
            )
            return _signal(db, user, signal_id)

    def signal(self, user: str, signal_id: str) -> Signal:
        """One signal. Raises ``NotFound``, and ``InvalidInput`` for an ambiguous prefix."""
        with self._database.reading() as db:
            return _signal(db, user, known_id(db, "signal", user, signal_id))

    def signals(
        self,
        user: str,
        *,
        kinds: Sequence[SignalKind] | None = None,
        turn: str | None = None,
        current: bool = True,
    ) -> tuple[Signal, ...]:
        """Oldest first; of one ``turn`` where that is given. ``current`` leaves out what was superseded or retracted."""
        wanted = list(SignalKind) if kinds is None else list(kinds)
        marks = ", ".join("?" * len(wanted))
        sql = f"select * from signal s where s.user = ? and s.kind in ({marks})"
        if current:
            sql += (
                " and not exists (select 1 from signal n where n.user = s.user and n.supersedes = s.id)"
                " and not exists (select 1 from retraction r where r.user = s.user and r.signal = s.id)"
            )
        of = [] if turn is None else [turn]
        if of:
            sql += " and s.turn = ?"
        with self._database.reading() as db:
            known_user(db, user)
            found = rows(db, sql + " order by s.seq", user, *[str(kind) for kind in wanted], *of)
        return tuple(signal_from(each) for each in found)

    def retract(self, user: str, *signals: str) -> None:
        """Switches signals off from now on, all or none. Retracting twice is fine and recorded once. Raises ``NotFound``."""
        with self._database.writing() as db:
            for each in signals:
                signal = known_id(db, "signal", user, each)
                if (
                    row(
                        db, "select seq from retraction where user = ? and signal = ?", user, signal
                    )
                    is None
                ):
                    hash_chain.append(
                        db,
                        user,
                        "retraction",
                        {"signal": signal, "at": hash_chain.as_text(self._now())},
                    )


def _count_removed(db: sqlite_utils.Database, user: str) -> int:
    (counted,) = rows(db, "select count(*) as removed from tombstone where user = ?", user)
    return int(counted["removed"])


def _check_removed(db: sqlite_utils.Database, user: str, removed: int | None) -> None:
    """Raise ``Forgotten`` where more of a user's entries are forgotten than there were then."""
    if removed is not None and _count_removed(db, user) != removed:
        raise Forgotten(
            "Something was forgotten while this reply was being written, so the reply is not kept.",
            hint="Ask again.",
        )


def _supersedable(
    db: sqlite_utils.Database, user: str, kind: SignalKind, turn: str | None, wanted: str
) -> str:
    older = _signal(db, user, known_id(db, "signal", user, wanted))
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
    newer = row(db, "select id from signal where user = ? and supersedes = ?", user, older.id)
    if newer is not None:
        raise InvalidInput(
            f"{older.id} is superseded already.", hint=f"Supersede {newer['id']} instead."
        )
    return older.id


def _newest_on_turn(
    db: sqlite_utils.Database, user: str, kind: SignalKind, turn: str, source: str
) -> str | None:
    # In older homes one source's word may have superseded another's, so the newest of a source may be off already.
    newest = row(
        db,
        "select s.id from signal s where s.user = ? and s.turn = ? and s.kind = ? and s.source = ?"
        " and not exists (select 1 from signal n where n.user = s.user and n.supersedes = s.id)"
        " order by s.seq desc limit 1",
        user,
        turn,
        str(kind),
        source,
    )
    return newest["id"] if newest else None


def _turn(db: sqlite_utils.Database, user: str, turn_id: str) -> Turn:
    (found,) = rows(db, "select * from turn where user = ? and id = ?", user, turn_id)
    return turn_from(found)


def _signal(db: sqlite_utils.Database, user: str, signal_id: str) -> Signal:
    (found,) = rows(db, "select * from signal where user = ? and id = ?", user, signal_id)
    return signal_from(found)


def turn_from(found: Row) -> Turn:
    """A turn from its row."""
    stack = hash_chain.from_json(found["stack"])
    sampling = hash_chain.from_json(found["sampling"])
    return Turn(
        id=found["id"],
        user=found["user"],
        at=hash_chain.as_moment(found["at"]),
        messages=tuple(map(Message.of_plain, hash_chain.from_json(found["messages"]))),
        reply=found["reply"],
        stack=Stack(stack["base"], tuple(StackEntry(*entry) for entry in stack["entries"])),
        sampling=Sampling(**{**sampling, "stop": tuple(sampling["stop"])}),
        usage=Usage(found["prompt_tokens"], found["completion_tokens"]),
        finish_reason=found["finish_reason"],
        used=tuple(hash_chain.from_json(found["used"])),
    )


def signal_from(found: Row) -> Signal:
    """A signal from its row."""
    return Signal(
        id=found["id"],
        user=found["user"],
        kind=SignalKind(found["kind"]),
        at=hash_chain.as_moment(found["at"]),
        payload=hash_chain.from_json(found["payload"]),
        turn=found["turn"],
        source=found["source"],
        supersedes=found["supersedes"],
    )
