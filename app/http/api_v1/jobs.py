"""Learns, practices and forgettings that a server runs: each in a thread of its own, watched by any number of readers.

Invariants: a user has at most one that runs, alone or among many, and there is at most one of many; a job that is over never
changes; at most so many are kept, of which the oldest that are over go first; nobody sees another user's, and administration, which
is the user None, sees all. A job lives as long as the process: what it learned is in the ledger, and a learn that was cut off goes on
from its last step when it is begun again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from personalpeft.clock import Clock
from personalpeft.erasure import ForgetReport
from personalpeft.errors import Busy, Cancelled, NotFound, PersonalPeftError, format_origin
from personalpeft.ids import new_id
from personalpeft.learning.report import LearnReport
from personalpeft_app.http.api_v1.schemas import Fault, Job, JobKind
from personalpeft_app.http.error_responses import bug_message

MOST_KEPT = 256
MOST_RUNNING = 8

Progress: TypeAlias = Callable[[str, float], None]
Asking: TypeAlias = Callable[[], bool]
Came: TypeAlias = LearnReport | ForgetReport | tuple[LearnReport, ...]
Work: TypeAlias = Callable[[Progress, Asking], Came]

_log = logging.getLogger("personalpeft.http")


@dataclass(slots=True)
class _Entry:
    job: Job
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Jobs:
    """All jobs of one server."""

    def __init__(self, clock: Clock, told: Callable[[PersonalPeftError], Fault]) -> None:
        """``told`` is what a stranger may hear of an error."""
        self._clock = clock
        self._told = told
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._closed = False

    def begin(
        self, user: str | None, kind: JobKind, work: Work, *, users: tuple[str, ...] = ()
    ) -> Job:
        """Begins it and gives it back as it is now; ``users`` are those of a job of many. Raises ``Busy`` while another of this
        user runs, or too many do.
        """
        with self._changed:
            running = [entry.job for entry in self._entries.values() if not entry.job.over]
            if any(job.user == user or user in job.users for job in running):
                raise Busy(
                    f"A learn of {user or 'many'} runs already.", hint="Wait for it, or cancel it."
                )
            if len(running) >= MOST_RUNNING or self._closed:
                raise Busy(
                    f"{len(running)} learns run already.",
                    hint="Begin this one later.",
                    retry_after=30,
                )
            job = Job(self._id(), user, kind, "running", "", 0.0, self._clock.now(), users=users)
            entry = self._entries[job.id] = _Entry(job)
            entry.thread = threading.Thread(
                target=self._run, args=(entry, work), name=f"learn-{job.id}", daemon=True
            )
            self._forget_the_oldest()
            entry.thread.start()
            return job

    def of(self, user: str | None) -> tuple[Job, ...]:
        """Those that a user may see, newest first."""
        with self._changed:
            return tuple(
                entry.job
                for entry in reversed(self._entries.values())
                if user in (None, entry.job.user)
            )

    def get(self, user: str | None, job_id: str) -> Job:
        """One of those. Raises ``NotFound``."""
        with self._changed:
            return self._entry(user, job_id).job

    def cancel(self, user: str | None, job_id: str) -> Job:
        """Asks it to stop after the running step; one that is over stays as it is. Raises ``NotFound``."""
        with self._changed:
            entry = self._entry(user, job_id)
            entry.stop.set()
            if entry.job.state == "running":
                self._change(entry, replace(entry.job, state="stopping"))
            return entry.job

    def watch(self, user: str | None, job_id: str, patience: float) -> Iterator[Job | None]:
        """How it is now, and each time that it has changed, until it is over; None when nothing has for ``patience`` seconds. A
        slow reader misses what was in between, and never the end. Raises ``NotFound``.
        """
        with self._changed:
            entry = self._entry(user, job_id)
        return self._watched(entry, patience)

    def forget(self, user: str) -> None:
        """Lets go of all that are over and a user's, alone or among many: their reports repeat what was said."""
        with self._changed:
            self._entries = {
                job_id: entry
                for job_id, entry in self._entries.items()
                if not entry.job.over or user not in (entry.job.user, *entry.job.users)
            }

    def close(self, patience: float = 30.0) -> None:
        """Asks all to stop, and waits for them so long."""
        with self._changed:
            self._closed = True
            entries = [entry for entry in self._entries.values() if not entry.job.over]
            for entry in entries:
                entry.stop.set()
        ends = self._clock.timer() + patience
        for entry in entries:
            if entry.thread is not None:
                entry.thread.join(max(0.0, ends - self._clock.timer()))

    def _watched(self, entry: _Entry, patience: float) -> Iterator[Job | None]:
        told: Job | None = None
        while told is None or not told.over:
            before, told = told, self._after(entry, told, patience)
            yield None if told is before else told

    def _after(self, entry: _Entry, told: Job | None, patience: float) -> Job:
        """How it is when it has changed since, or after ``patience`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: entry.job is not told, timeout=patience)
            return entry.job

    def _run(self, entry: _Entry, work: Work) -> None:
        def heard(stage: str, done: float) -> None:
            with self._changed:
                self._change(
                    entry,
                    replace(entry.job, stage=stage, progress=round(min(max(done, 0.0), 1.0), 3)),
                )

        came: Came | None = None
        error: Fault | None = None
        state: Literal["done", "failed", "cancelled"] = "done"
        try:
            came = work(heard, entry.stop.is_set)
            # Of many, each says so for itself.
            if isinstance(came, tuple) and any(each.error == Cancelled.__name__ for each in came):
                state = "cancelled"
        except PersonalPeftError as reason:
            error = self._told(reason)
            state = "cancelled" if isinstance(reason, Cancelled) else "failed"
        except Exception as bug:  # noqa: BLE001 - a thread has nobody above it: whatever it was, the reader has to hear of it.
            _log.error("a job failed: %s", format_origin(bug))
            error, state = bug_fault(bug), "failed"
        with self._changed:
            over = replace(
                entry.job, state=state, ended=self._clock.now(), error=error, **_format_error(came)
            )
            self._change(entry, over)

    def _change(self, entry: _Entry, job: Job) -> None:
        if job != entry.job:
            entry.job = job
            self._changed.notify_all()

    def _entry(self, user: str | None, job_id: str) -> _Entry:
        entry = self._entries.get(job_id)
        if entry is None or user not in (None, entry.job.user):
            raise NotFound(
                f"There is no job {job_id}{f' of {user}' if user else ''}.",
                hint="A server remembers only its own; what was learned is under reports.",
            )
        return entry

    def _forget_the_oldest(self) -> None:
        over = [job_id for job_id, entry in self._entries.items() if entry.job.over]
        for job_id in over[: max(0, len(self._entries) - MOST_KEPT)]:
            del self._entries[job_id]

    def _id(self) -> str:
        return new_id("j", self._clock.now(), self._clock.entropy)


def bug_fault(bug: Exception) -> Fault:
    """Return what a caller may know of a bug."""
    return Fault("Bug", bug_message(bug))


def _format_error(came: Came | None) -> dict[str, Any]:
    """The field of a job that holds what came of it."""
    match came:
        case LearnReport():
            return {"report": came}
        case ForgetReport():
            return {"forgotten": came}
        case tuple():
            return {"reports": came}
    return {}
