"""Order the training calls of all runs, and have them executed on one thread.

Invariants: the calls of a run are executed in the order of their ``seq``, not of their arrival.
Passes of several runs that are ready at the same time are executed together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from personalpeft.clock import Clock
from personalpeft.errors import format_origin
from personalpeft_tinker_server.database import Database
from personalpeft_tinker_server.executor import PASSES, Executor
from personalpeft_tinker_server.futures import Futures, Outcome, QueuedCall

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
# The most seconds that a pass waits for those of other runs, and a run counts as busy after a call.
# So runs whose clients do the same at once stay together.
GATHER_SECONDS = 0.02
_MAINTENANCE_SECONDS = 10.0
# Seconds that calls wait for one with a lower number that the client never posted.
_MISSING_SECONDS = 600.0


class Trainer:
    """The thread that trains.

    Args:
        executor: Executes the calls, on this thread alone.
        database: Has the runs.
        futures: Has the calls.
        clock: The time.
        maintenance: Called every few seconds between calls.
    """

    def __init__(
        self,
        executor: Executor,
        database: Database,
        futures: Futures,
        clock: Clock,
        maintenance: Callable[[], None],
    ) -> None:
        self._executor, self._maintenance = executor, maintenance
        self._db, self._futures, self._clock = database, futures, clock
        self._wake = threading.Condition(threading.RLock())
        self._news = False
        self._started = clock.now().timestamp()
        self._stopping = False
        self._maintenance_due = False
        # Since when there are passes that wait for others.
        self._gathering: float | None = None
        self._thread = threading.Thread(
            target=self._work, name="personalpeft-tinker-training", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notify(self) -> None:
        """Say that there is a new call."""
        with self._wake:
            self._news = True
            self._wake.notify_all()

    def run_maintenance(self) -> None:
        """Have the thread do its maintenance now, and wait for that."""
        with self._wake:
            self._maintenance_due = True
            self.notify()
            self._wake.wait_for(lambda: self._stopping or not self._maintenance_due)

    def close(self) -> None:
        """Stop after the running call, and free all sessions. Queued calls stay queued."""
        self._stopping = True
        self.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        last_maintenance = self._clock.timer()
        try:
            while not self._stopping:
                calls: list[QueuedCall] = []
                idle = IDLE_SECONDS
                try:
                    if (
                        self._maintenance_due
                        or self._clock.timer() - last_maintenance >= _MAINTENANCE_SECONDS
                    ):
                        last_maintenance = self._clock.timer()
                        self._maintenance()
                        self._executor.evict_runs()
                        with self._wake:
                            self._maintenance_due = False
                            self._wake.notify_all()
                    calls, idle = self._gather(self._ready_calls())
                    if calls:
                        self._executor.execute(calls)
                        continue
                except Exception as error:  # noqa: BLE001 - the thread must outlive any error
                    log.error("training: %s", format_origin(error))
                    # Their results may not be stored, so they are executed again. Opened again,
                    # their runs have what the stored calls did.
                    for call in calls:
                        self._executor.drop(call.run)
                with self._wake:
                    if not self._news and not self._stopping:
                        self._wake.wait(idle)
                    self._news = False
        finally:
            self._executor.close()

    def _ready_calls(self) -> list[QueuedCall]:
        """Return the next call of each run, where it has arrived."""
        # The calls first: a run is stored before its first call.
        queued = self._futures.queued(in_runs=True)
        next_seq = {
            row["id"]: row["next_seq"]
            for row in self._db.rows("select id, next_seq from runs where open")
        }
        ready: dict[str, QueuedCall] = {}
        waiting: dict[str, list[QueuedCall]] = {}
        for call in queued:
            run = call.run or ""
            if run not in next_seq:
                error = (
                    "The run was released: its client sent no heartbeats or unloaded it, or a"
                    " layer that it was trained from was forgotten."
                )
                self._futures.finish(call, Outcome(None, error, "user"))
            elif run in ready:
                continue
            elif call.seq is not None and call.seq < next_seq[run]:
                error = (
                    f"The run is past call {call.seq}: it was executed and its result was deleted,"
                    " or it came too late."
                )
                self._futures.finish(call, Outcome(None, error, "user"))
            # A call without a number follows those that arrived before it.
            elif call.seq == next_seq[run] or (call.seq is None and run not in waiting):
                ready[run] = call
            else:
                waiting.setdefault(run, []).append(call)
        for run in waiting.keys() - ready.keys():
            self._end_if_missing(next_seq[run], waiting[run])
        return list(ready.values())

    def _gather(self, ready: list[QueuedCall]) -> tuple[list[QueuedCall], float]:
        """Return the calls to execute now; if there are none, the seconds to wait for more.

        Passes wait for the other calls that are ready, and for busy runs, whose next calls may be
        passes. So they reach the backend together.
        """
        passes = [call for call in ready if call.kind in PASSES]
        if not passes:
            self._gathering = None
            return ready, IDLE_SECONDS
        now = self._clock.timer()
        self._gathering = self._gathering or now
        left = self._gathering + GATHER_SECONDS - now
        if left > 0:
            if len(passes) < len(ready):
                return [call for call in ready if call.kind not in PASSES], 0.0
            here = {call.run for call in ready}
            if self._executor.is_any_busy(GATHER_SECONDS, except_for=here):
                return [], left
        self._gathering = None
        return ready, 0.0

    def _end_if_missing(self, seq: int, waiting: Sequence[QueuedCall]) -> None:
        """End the calls of a run that waited too long for one with a lower number.

        All of them, since the later ones count on it, too.
        """
        (oldest,) = self._db.rows(
            "select min(created) as at from calls where run = ? and status = 'queued'"
            " and seq is not null",
            waiting[0].run,
        )
        # Clients cannot post while the server is stopped.
        since = max(oldest["at"], self._started)
        if self._clock.now().timestamp() - since < _MISSING_SECONDS:
            return
        error = (
            f"Call {seq} of the run did not arrive within {_MISSING_SECONDS / 60:g} minutes, so the"
            " calls that waited for it ended."
        )
        for call in waiting:
            if call.seq is not None:
                self._futures.finish(call, Outcome(None, error, "user"))
