"""Learns, practices, forgets and rebases that the server runs, each in a thread, with any number of readers.

Invariants:

- A user has at most one running job, alone or among several users. One job of several users runs,
  and one rebase, which holds a second base in memory.
- An ended job never changes. The oldest ended jobs are dropped first.
- A user sees no other user's jobs. The admin, the user None, sees all.

Jobs live as long as the process. Their results are in the ledger, and an interrupted learn
continues from its last step when it is started again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from personalpeft.clock import SYSTEM
from personalpeft.erasure import ForgetReport
from personalpeft.errors import Busy, Cancelled, NotFound
from personalpeft.ids import new_id
from personalpeft.learning.report import LearnReport
from personalpeft.rebase import RebaseReport
from personalpeft_app.http.api_v1.schemas import ErrorDetails, Job, JobKind

MOST_KEPT = 256
MOST_RUNNING = 8

JobResult: TypeAlias = LearnReport | ForgetReport | RebaseReport | tuple[LearnReport, ...]
# Called with ``progress`` and ``cancelled``, as the library's own methods.
Work: TypeAlias = Callable[..., JobResult]

_RESULT_FIELDS: Mapping[type, str] = {
    LearnReport: "report",
    ForgetReport: "forget_report",
    RebaseReport: "rebase_report",
    tuple: "reports",
}


@dataclass(slots=True)
class _Entry:
    job: Job
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)


class Jobs:
    """The jobs of one server."""

    def __init__(self, describe: Callable[[BaseException], ErrorDetails]) -> None:
        """Make the jobs. ``describe`` returns the details of an error that a client may see."""
        self._describe = describe
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._closed = False

    def begin(
        self, user: str | None, kind: JobKind, work: Work, *, users: tuple[str, ...] = ()
    ) -> Job:
        """Start a job and return it. ``users`` are those of a job of several users.

        Raises ``Busy`` while another job of the user runs, or too many jobs do.
        """
        with self._changed:
            running = [entry.job for entry in self._entries.values() if not entry.job.over]
            if any(job.user == user or user in job.users for job in running):
                raise Busy(
                    f"A job of {user or 'several users'} runs already.",
                    hint="Wait for it, or cancel it.",
                )
            is_second = kind == "rebase" and any(job.kind == kind for job in running)
            if is_second or len(running) >= MOST_RUNNING or self._closed:
                raise Busy(
                    f"No further {kind} can start now.",
                    hint="Start this one later.",
                    retry_after=30,
                )
            now = SYSTEM.now()
            name = new_id("j", now, SYSTEM.entropy)
            job = Job(name, user, kind, "running", "", 0.0, now, users=users)
            entry = self._entries[job.id] = _Entry(job)
            entry.thread = threading.Thread(
                target=self._run, args=(entry, work), name=f"learn-{job.id}", daemon=True
            )
            self._drop_oldest()
            entry.thread.start()
            return job

    def of(self, user: str | None) -> tuple[Job, ...]:
        """Return the jobs that a user may see, newest first."""
        with self._changed:
            return tuple(
                entry.job
                for entry in reversed(self._entries.values())
                if user in (None, entry.job.user)
            )

    def get(self, user: str | None, job_id: str) -> Job:
        """Return a job that a user may see. Raises ``NotFound``."""
        with self._changed:
            return self._entry(user, job_id).job

    def cancel(self, user: str | None, job_id: str) -> Job:
        """Stop a job after its running step. An ended one stays as it is. Raises ``NotFound``."""
        with self._changed:
            entry = self._entry(user, job_id)
            entry.stop.set()
            if entry.job.state == "running":
                self._change(entry, state="stopping")
            return entry.job

    def watch(self, user: str | None, job_id: str, heartbeat: float) -> Iterator[Job | None]:
        """Yield the job now and after changes until it ends, and None after ``heartbeat`` seconds.

        A slow reader misses states in between, never the end. Raises ``NotFound``.
        """
        with self._changed:
            entry = self._entry(user, job_id)
            seen = entry.job
        yield seen
        while not seen.over:
            with self._changed:
                changed = self._changed.wait_for(
                    lambda: entry.job is not seen,  # noqa: B023 - it is called here alone
                    timeout=heartbeat,
                )
                seen = entry.job
            yield seen if changed else None

    def forget(self, user: str) -> None:
        """Drop the ended jobs of a user: their reports quote feedback."""
        with self._changed:
            self._entries = {
                job_id: entry
                for job_id, entry in self._entries.items()
                if not entry.job.over or user not in (entry.job.user, *entry.job.users)
            }

    def stop(self) -> None:
        """Stop all jobs after their running steps. None starts from now on."""
        with self._changed:
            self._closed = True
            for entry in self._entries.values():
                entry.stop.set()

    def close(self) -> None:
        """Stop all jobs, and wait up to half a minute for them."""
        self.stop()
        with self._changed:
            entries = [entry for entry in self._entries.values() if not entry.job.over]
        ends = SYSTEM.timer() + 30
        for entry in entries:
            entry.thread.join(max(0.0, ends - SYSTEM.timer()))

    def _run(self, entry: _Entry, work: Work) -> None:
        def progress(stage: str, done: float) -> None:
            self._change(entry, stage=stage, progress=round(min(max(done, 0.0), 1.0), 3))

        end: dict[str, Any] = {"state": "done"}
        try:
            result = work(progress=progress, cancelled=entry.stop.is_set)
            # In a job of several users each report holds its own error.
            if isinstance(result, tuple) and any(
                each.error == Cancelled.__name__ for each in result
            ):
                end["state"] = "cancelled"
            end[_RESULT_FIELDS[type(result)]] = result
        except BaseException as reason:  # noqa: BLE001 - readers must see the end of the job.
            state = "cancelled" if isinstance(reason, Cancelled) else "failed"
            end = {"state": state, "error": self._describe(reason)}
        self._change(entry, ended_at=SYSTEM.now(), **end)

    def _change(self, entry: _Entry, **fields: Any) -> None:
        with self._changed:
            job = replace(entry.job, **fields)
            if job != entry.job:
                entry.job = job
                self._changed.notify_all()

    def _entry(self, user: str | None, job_id: str) -> _Entry:
        entry = self._entries.get(job_id)
        if entry is None or user not in (None, entry.job.user):
            raise NotFound(
                f"There is no job {job_id}{f' of {user}' if user else ''}.",
                hint="A server knows jobs of its own process; GET reports lists results.",
            )
        return entry

    def _drop_oldest(self) -> None:
        over = [job_id for job_id, entry in self._entries.items() if entry.job.over]
        for job_id in over[: max(0, len(self._entries) - MOST_KEPT)]:
            del self._entries[job_id]
