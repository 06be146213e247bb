"""Calls and their results: queued, executed in order, and kept for the client to fetch.

Invariants: a call is durable before its id is returned. Posting it again returns the same id. A
result is durable before it can be fetched. After a restart a call that has no result is executed.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from personalpeft.clock import Clock
from personalpeft.errors import QueueFull
from personalpeft_tinker_server.database import MAX_BYTES, Database

Category: TypeAlias = Literal["unknown", "server", "user"]

# Queued calls of one run, and of one owner outside of runs, before a client must wait.
MAX_QUEUED = 512
_RETRY_SECONDS = 2.0
# Seconds that results are kept.
_KEPT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """One call. ``position`` is the order of arrival, ``seq`` the client's order in a run.

    ``is_new`` is False where the call was known already.
    """

    position: int
    id: str
    owner: str
    run: str | None
    kind: str
    seq: int | None
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a finished call as JSON, or its error."""

    result: bytes | None
    error: str | None
    category: Category | None


def call_id(*parts: object) -> str:
    """Return an id that depends on the parts alone, so that a repeated call is known."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


class Futures:
    """The queue of all calls. Thread-safe."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db, self._clock = database, clock
        # Those who wait for a call, by its id. The lock guards it and ``_closed``.
        self._waiting: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self,
        owner: str,
        kind: str,
        body: bytes,
        *,
        id_: str | None = None,
        run: str | None = None,
        seq: int | None = None,
    ) -> QueuedCall:
        """Queue a call, or return the one that has this id.

        Raises:
            QueueFull: Too many calls of the run or the owner are queued, or too many bytes.
        """
        id_ = id_ or self._clock.entropy(16).hex()
        with self._db.transaction():
            known = self._db.row("select * from calls where id = ? and owner = ?", id_, owner)
            if known is not None:
                return _call(known, is_new=False)
            queued = self._db.row(
                "select count(*) as count from calls where status = 'queued' and owner = ?"
                " and run is ?",
                owner,
                run,
            )
            if queued is not None and queued["count"] >= MAX_QUEUED:
                raise QueueFull(
                    f"{MAX_QUEUED} calls are queued already.",
                    hint=f"Try again in {_RETRY_SECONDS:g} s.",
                    retry_after=_RETRY_SECONDS,
                )
            if not self._db.has_room(owner, len(body)):
                raise QueueFull(
                    f"The queued calls and weights of this token exceed {MAX_BYTES // 2**30} GiB.",
                    hint="Wait for the calls, or delete checkpoints.",
                    retry_after=_RETRY_SECONDS,
                )
            self._db.execute(
                "insert into calls (id, owner, run, kind, seq, body, created)"
                " values (?, ?, ?, ?, ?, ?, ?)",
                *(id_, owner, run, kind, seq, body, self._now()),
            )
            (made,) = self._db.rows("select * from calls where id = ?", id_)
            return _call(made)

    def body(self, call: QueuedCall) -> bytes:
        """Return the body that a call was posted with."""
        (row,) = self._db.rows("select body from calls where id = ?", call.id)
        return bytes(row["body"])

    def queued(self, *, in_runs: bool) -> list[QueuedCall]:
        """Return the calls without a result, oldest first."""
        test = "is not" if in_runs else "is"
        return self._calls(f"status = 'queued' and run {test} null order by position")

    def executed_after(self, run: str, executed: int) -> list[QueuedCall]:
        """Return a run's calls after the first ``executed`` that succeeded, in their order."""
        return self._calls(
            "run = ? and executed > ? and status = 'done' order by executed", run, executed
        )

    def finish(self, call: QueuedCall, outcome: Outcome) -> None:
        """Store the result of a call. Only the first result of a call counts."""
        with self._db.transaction():
            changed = self._db.execute(
                "update calls set status = ?, result = ?, error = ?, category = ?, finished = ?"
                " where id = ? and status = 'queued'",
                "failed" if outcome.error is not None else "done",
                *(outcome.result, outcome.error, outcome.category, self._now(), call.id),
            )
            if changed and call.run is not None:
                self._db.execute(
                    "update runs set executed = executed + 1, seen = ?,"
                    " next_seq = max(next_seq, coalesce(? + 1, 0)) where id = ?",
                    *(self._now(), call.seq, call.run),
                )
                self._db.execute(
                    "update calls set executed = (select executed from runs where id = ?)"
                    " where id = ?",
                    *(call.run, call.id),
                )
        with self._lock:
            for event in self._waiting.pop(call.id, ()):
                event.set()

    def wait(self, owner: str, id_: str, timeout: float) -> Outcome | QueuedCall | None:
        """Return the outcome of a call, or the call if it has none in time; None if it is unknown."""
        event = threading.Event()
        with self._lock:
            # Before the row is read, so that no result comes between.
            if not self._closed:
                self._waiting.setdefault(id_, []).append(event)
        try:
            found = self._find(owner, id_)
            if isinstance(found, QueuedCall) and timeout > 0 and not self._closed:
                event.wait(timeout)
                found = self._find(owner, id_)
            return found
        finally:
            with self._lock:
                if event in (events := self._waiting.get(id_, [])):
                    events.remove(event)
                if not events:
                    self._waiting.pop(id_, None)

    def _find(self, owner: str, id_: str) -> Outcome | QueuedCall | None:
        row = self._db.row(
            "select position, id, owner, run, kind, seq, status, result, error, category"
            " from calls where id = ? and owner = ?",
            *(id_, owner),
        )
        if row is None:
            return None
        if row["status"] != "queued":
            return Outcome(row["result"], row["error"], row["category"])
        return _call(row)

    def delete_old(self) -> None:
        """Delete results that were kept long enough, unless a restart would need the calls."""
        self._db.execute(
            "delete from calls where status != 'queued' and finished < ? and not exists ("
            " select 1 from runs where runs.id = calls.run and runs.open"
            " and calls.executed > runs.state_executed)",
            self._now() - _KEPT_SECONDS,
        )

    def close(self) -> None:
        """Let those who wait go."""
        with self._lock:
            self._closed = True
            for event in (event for events in self._waiting.values() for event in events):
                event.set()

    def _calls(self, test: str, *values: object) -> list[QueuedCall]:
        columns = "position, id, owner, run, kind, seq"
        return [
            _call(row)
            for row in self._db.rows(f"select {columns} from calls where {test}", *values)
        ]

    def _now(self) -> float:
        return self._clock.now().timestamp()


def _call(row: sqlite3.Row, *, is_new: bool = True) -> QueuedCall:
    return QueuedCall(
        row["position"],
        row["id"],
        row["owner"],
        row["run"],
        row["kind"],
        row["seq"],
        is_new=is_new,
    )
