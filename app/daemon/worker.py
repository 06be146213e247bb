"""Carry out the daemon's decisions, one action after another, and record each.

Invariants:

- The caller holds the home's lease, so a home has one worker.
- A learn is recorded before it starts, and its result before anything else starts. A kill costs the
  running action alone: a learn resumes from its checkpoint, and a task runs again.
- A learn yields between two of its steps. It stops if the process ends or mains power is lost, and
  keeps its steps. It pauses during a reply.
- An error of one user or task does not end the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, TypeAlias

from personalpeft import (
    Busy,
    Cancelled,
    HomeError,
    LearnReport,
    NotFound,
    NothingToLearn,
    PersonalPeftError,
    Runtime,
)
from personalpeft.clock import SYSTEM, Clock
from personalpeft.errors import format_origin
from personalpeft.learning.status import Pending
from personalpeft.store.types import UserSummary
from personalpeft_app.daemon import TASK, policy, tasks
from personalpeft_app.daemon.journal import (
    MAX_INTERRUPTIONS,
    MAX_MESSAGE,
    FailedTask,
    Journal,
    LogEntry,
    Outcome,
    TaskKind,
    from_text,
    local_day,
)
from personalpeft_app.daemon.machine import Machine, MachineReading
from personalpeft_app.daemon.settings import Settings, read_settings

log = logging.getLogger(__name__)

OpenRuntime: TypeAlias = Callable[[], AbstractContextManager[Runtime]]

# Seconds between two readings of the sensors during a learn, and two records of its duration.
_PROBE_SECONDS = 5.0
_RECORD_SECONDS = 15.0
# A rollback, among others, alters no number of a user's summary. It is seen after this many reads.
_FULL_READ_EVERY = 30


class Worker:
    """Runs the daemon's actions in the home of an open runtime.

    Args:
        runtime: The home.
        open_learning: Opens another runtime on the same home to learn with. It is closed later,
            so that no model stays in memory.
        tell: Called with each action that ended.
        stopping: Whether the process is to end.
    """

    def __init__(
        self,
        runtime: Runtime,
        open_learning: OpenRuntime,
        *,
        tell: Callable[[LogEntry], None] = lambda entry: None,
        stopping: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM,
        sensors: Callable[[], MachineReading] | None = None,
    ) -> None:
        self._runtime = runtime
        self._open_learning = open_learning
        self._tell = tell
        self._stopping = stopping
        self._clock = clock
        self._sensors = sensors or Machine().read
        self._backlogs = BacklogCache()
        self._settings = Settings()
        # By what failed, the last fault: the same one is logged once, not every minute.
        self._faults: dict[str, str] = {}
        # Users whom another process trains now; this round leaves them out.
        self._busy: set[str] = set()
        # Users whose learn the home itself stopped, as a full disk does, and when.
        self._postponed: dict[str, datetime] = {}
        self.journal = from_text(runtime.maintenance.read_note(TASK))

    def run_once(self) -> policy.Decision:
        """Act until nothing is due or the process is to end. Return what comes next.

        Raises what the home itself raises, as ``HomeError`` on a full disk.
        """
        self._busy.clear()
        self._read_settings()
        self._abandon_interrupted()
        with ExitStack() as stack:
            learning: Runtime | None = None
            while True:
                decision = self._decide()
                if decision.action is None or self._stopping():
                    return decision
                if isinstance(decision.action, policy.Task):
                    self._run_task(decision.action)
                    continue
                if learning is None:
                    try:
                        learning = stack.enter_context(self._open_learning())
                    except PersonalPeftError as error:
                        # The base may be missing. Tasks that need none run all the same.
                        user = decision.action.user
                        self._postponed[user] = self._clock.now()
                        # It concerns all users alike.
                        fault = f"{_describe(error)} The daemon tries again later."
                        self._log_fault("learn", fault, user=user)
                        continue
                    self._faults.pop("learn", None)
                self._learn(learning, decision.action)

    def preview(self) -> policy.Decision:
        """Return the due actions and the next ones, and do nothing. A read-only home is enough.

        Raises ``InvalidInput`` for invalid settings.
        """
        self._settings = read_settings(self._runtime.settings.home)
        return self._decide()

    @property
    def spent(self) -> float:
        """The seconds of learning that today's budget has lost."""
        return self.journal.spent_on(self._clock.now(), self._settings.time_zone())

    def _decide(self) -> policy.Decision:
        attempts = self.journal.attempts
        backlogs = [
            pending.without(attempts.get(user, ()))
            for user, pending in self._backlogs.read(self._runtime).items()
            if user not in self._busy and not self._is_postponed(user)
        ]
        now, served = self._clock.now(), self._runtime.maintenance.last_activity()
        zone = self._settings.time_zone()
        host = policy.HostState(now, zone, **asdict(self._sensors()), served=served)
        return policy.plan(self._settings, host, backlogs, self.journal)

    def _is_postponed(self, user: str) -> bool:
        # A distance, as ``policy`` measures: a clock that is set back postpones nothing further.
        failed = self._postponed.get(user)
        return failed is not None and abs(self._clock.now() - failed) < policy.RETRY

    def _read_settings(self) -> None:
        try:
            self._settings = read_settings(self._runtime.settings.home)
            self._faults.pop("settings", None)
        except PersonalPeftError as error:
            # The former settings stay in force.
            self._log_fault("settings", f"{error.message} {error.hint}")

    def _abandon_interrupted(self) -> None:
        """Abandon learns that were cut off again and again with their process."""
        for user, started in self.journal.started.items():
            if started.times >= MAX_INTERRUPTIONS:
                keys = (*self.journal.attempts.get(user, ()), *started.keys)
                journal = self.journal.futile(user, keys).finish(user)
                message = f"was cut off {started.times} times; it waits for a new reason"
                self._log(journal, "learn", message, user=user, outcome=Outcome.ABANDONED)

    def _learn(self, runtime: Runtime, learn: policy.LearnUser) -> None:
        user, attempts = learn.user, self.journal.attempts.get(learn.user, ())
        try:
            pending = runtime.user(user, create=False).pending().without(attempts)
        except NotFound:  # The user was forgotten after this was decided.
            self._backlogs.forget(user)
            return
        keys = tuple(each.key for each in pending.triggers)
        resumed = user in self.journal.started
        # A start that a full disk does not take is no learn that was cut off: the note comes first.
        journal = self.journal.start(user, keys)
        self._runtime.maintenance.write_note(TASK, journal.as_text())
        self.journal = journal
        monitor = _HostMonitor(self)
        futile = attempts
        try:
            report = runtime.user(user, create=False).learn(
                seconds=learn.seconds, cancelled=monitor.cancelled, paused=monitor.paused
            )
            outcome, message = Outcome.DONE, _summarize(report)
            # A learn out of time may not have reached the layers above; the ledger records that it
            # is unfinished. If another process moved the head, its lessons were not tried.
            if not any(each.is_unfinished or each.moved for each in (report, *report.above)):
                futile = (*attempts, *keys)
        except NothingToLearn as error:
            outcome, message, futile = Outcome.NOTHING, error.message, (*attempts, *keys)
        except Cancelled:
            why = "the plug was pulled" if monitor.unplugged else "the daemon ends"
            outcome = Outcome.STOPPED
            message = f"stopped between two steps, since {why}; it goes on later"
        except Busy as error:
            outcome, message = Outcome.BUSY, f"{error.message} The daemon tries again later."
            self._busy.add(user)
        except HomeError as error:
            outcome, message = Outcome.FAILED, f"{_describe(error)} The daemon tries again later."
            self._postponed[user] = self._clock.now()
        except Exception as error:  # noqa: BLE001 - the next action runs all the same
            outcome, message, futile = Outcome.FAILED, _describe(error), (*attempts, *keys)
        seconds = monitor.finish()
        self._backlogs.forget(user)
        if futile != attempts:
            # Only reasons that are still pending: the ledger records the rest.
            still = self._pending_keys(user)
            futile = tuple(key for key in futile if key in still)
        journal = self.journal.finish(user).futile(user, futile)
        message = f"{learn.reason}: {'goes on; ' if resumed else ''}{message}"
        result = {"seconds": seconds, "outcome": outcome, "resumed": resumed}
        self._log(journal, "learn", message, user=user, **result)

    def _pending_keys(self, user: str) -> frozenset[str]:
        """Return the keys of a user's pending lessons; none if the user was forgotten."""
        with suppress(NotFound):
            pending = self._runtime.user(user, create=False).pending()
            return frozenset(each.key for each in pending.triggers)
        return frozenset()

    def _run_task(self, task: policy.Task) -> None:
        began = self._clock.timer()
        window = tasks.next_window(self.journal.last_report, self._clock.now())
        try:
            message = tasks.run_task(task.kind, self._runtime, self._settings, window)
        except Exception as error:  # noqa: BLE001 - the next action runs all the same
            self._record_failure(task, _describe(error))
            return
        journal = self.journal.record_task(task.kind, task.key)
        if message and task.kind is TaskKind.REPORT:
            journal = replace(journal, last_report=window)
        if message:
            self._log(journal, task.kind, message, seconds=self._clock.timer() - began)
        else:
            self._save_journal(journal)

    def _record_failure(self, task: policy.Task, message: str) -> None:
        """Record a failed task, which is tried again later. The same error is logged once."""
        before = self.journal.failed.get(task.kind)
        failure = FailedTask(task.key, self._clock.now(), message[:MAX_MESSAGE])
        failed = {**self.journal.failed, task.kind: failure}
        journal = replace(self.journal, failed=failed)
        if before is not None and (before.key, before.message) == (failure.key, failure.message):
            self._save_journal(journal)
        else:
            self._log(journal, task.kind, message, outcome=Outcome.FAILED)

    def _log_fault(self, kind: str, fault: str, user: str = "") -> None:
        if self._faults.get(kind) != fault:
            self._faults[kind] = fault
            self._log(self.journal, kind, fault, user=user, outcome=Outcome.FAILED)

    def _log(self, journal: Journal, kind: str, message: str, **result: Any) -> None:
        self._save_journal(journal.log(self._clock.now(), kind, message, **result))
        self._tell(self.journal.entries[-1])

    def _save_journal(self, journal: Journal) -> None:
        # Memory first: on a full disk, this process still knows its actions.
        self.journal = journal
        self._runtime.maintenance.write_note(TASK, journal.as_text())


class BacklogCache:
    """The pending learns of all users. Reads a user anew only after their summary changed."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[UserSummary, Pending]] = {}
        self._reads = 0

    def read(self, runtime: Runtime) -> dict[str, Pending]:
        """Return, by user, what is pending of those with something to learn."""
        now: dict[str, tuple[UserSummary, Pending]] = {}
        self._reads += 1
        if self._reads % _FULL_READ_EVERY == 0:
            self._pending = {}
        for summary in runtime.iter_users():
            before = self._pending.get(summary.id)
            if before is not None and before[0] == summary:
                now[summary.id] = before
            elif summary.signals:
                with suppress(NotFound):  # The user was deleted after the page was read.
                    now[summary.id] = summary, runtime.user(summary.id, create=False).pending()
        self._pending = now
        return {user: pending for user, (_, pending) in now.items() if pending.triggers}

    def forget(self, user: str) -> None:
        """Read this user anew the next time."""
        self._pending.pop(user, None)


class _HostMonitor:
    """Watches the machine during a learn, and records how long the learn has run."""

    def __init__(self, worker: Worker) -> None:
        self.unplugged = False
        self._worker = worker
        self._hot = False
        self._day = local_day(worker._clock.now(), worker._settings.time_zone())
        self._probed: float | None = None
        self._began = self._recorded = worker._clock.timer()

    def cancelled(self) -> bool:
        self._probe()
        return self._worker._stopping() or self.unplugged

    def paused(self) -> bool:
        self._probe()
        served = self._worker._runtime.maintenance.last_activity()
        return self._hot or (
            served is not None and abs(self._worker._clock.now() - served) < policy.QUIET
        )

    def finish(self) -> float:
        """Record the rest of the time. Return the seconds of the learn."""
        now = self._worker._clock.timer()
        self._worker.journal = self._add_time(now)
        return now - self._began

    def _probe(self) -> None:
        now, settings = self._worker._clock.timer(), self._worker._settings
        if self._probed is not None and now - self._probed < _PROBE_SECONDS:
            return
        self._probed = now
        reading = self._worker._sensors()
        self._hot = reading.temperature is not None and reading.temperature >= settings.temperature
        self.unplugged = settings.require_ac_power and reading.on_ac_power is False
        if now - self._recorded >= _RECORD_SECONDS:
            # A kill does not restore the budget that was used.
            self._worker._save_journal(self._add_time(now))

    def _add_time(self, now: float) -> Journal:
        seconds, self._recorded = now - self._recorded, now
        return self._worker.journal.add_time(self._day, seconds)


def _describe(error: Exception) -> str:
    if isinstance(error, PersonalPeftError):
        return f"failed: {error.message} {error.hint}"
    log.error("an action failed: %s", format_origin(error))
    return f"failed: {type(error).__name__}; the log has the details"


def _summarize(report: LearnReport) -> str:
    """Return the result of a learn, without any text of the user."""
    parts = []
    for each in (report, *report.above):
        revision = f" ({each.revision})" if each.revision else ""
        parts.append(f"{each.layer}: {each.error or each.outcome.text}{revision}, {each.reason}")
    return "; ".join(parts)
