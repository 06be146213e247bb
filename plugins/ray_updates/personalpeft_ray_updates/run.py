"""One run: give users to free workers, collect reports, and retry where a worker was lost.

Invariants:

- A user learns once from each signal, however many workers are lost. A learn holds the user's lease
  and publishes in one transaction. Afterwards it has nothing to learn.
- The publications of a lost worker are read from the ledger. They are the reports of its users.
- Every user has one report. An error of one user stops no other; an error of all is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from personalpeft import (
    DEFAULT_BASE,
    InvalidInput,
    LearnReport,
    NotFound,
    PersonalPeftError,
    Runtime,
    ServingFailed,
    TrainingStatus,
    User,
)
from personalpeft.learning.outcomes import LearnOutcome, text_reason
from personalpeft_ray_updates.cluster import (
    WorkerHandle,
    WorkerLost,
    WorkerResources,
    connect_ray,
    local_ray_options,
    max_workers,
    shutdown,
    wait_for_results,
)
from personalpeft_ray_updates.work_queue import MAX_LOSSES, WorkQueue
from personalpeft_ray_updates.worker import OpenOptions

_POLL_SECONDS = 0.5
# Seconds to wait for a lease after a worker was lost: the system may still be freeing it.
_LEASE_SECONDS = 10.0
# Workers in a row that may be lost before they start.
_MAX_FAILED_STARTS = 3
_MIN_TIME = datetime.min.replace(tzinfo=UTC)
_MAX_TIME = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run.

    Attributes:
        users: How many users it has in all.
        reports: The reports so far, in the order in which they came.
        workers: By process id, the worker's users and their running learns.
        lost: How many workers were lost.
    """

    users: int
    reports: tuple[LearnReport, ...]
    workers: Mapping[int, Mapping[str, TrainingStatus | None]]
    lost: int


def learn_on_cluster(
    users: Sequence[str],
    *,
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    backend: str = "torch",
    workers: int = 2,
    at_once: int = 8,
    cpus: int = 1,
    gpus: float = 0.0,
    progress: Callable[[RunStatus], None] = lambda status: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[LearnReport, ...]:
    """Learn for users of one home in several processes, as ``Runtime.learn_many`` does in one.

    The processes are workers of the Ray that this program is connected to. Without one, a new Ray
    is started on this machine and ended afterwards. A learn may end early by ``cancelled``, an
    exception or a kill. It loses no saved step: the next learn of the user continues from there.

    Args:
        users: Ids of users, each once.
        home: As for ``personalpeft.open``; it must exist.
        base: As for ``personalpeft.open``.
        backend: As for ``personalpeft.open``.
        workers: The most processes; each loads the base. Fewer are used if fewer fit.
        at_once: Users that learn in one pass of a worker.
        cpus: CPUs of this machine for a worker.
        gpus: GPUs of this machine for a worker; a share is allowed.
        progress: Called about twice a second in the caller's thread.
        cancelled: Whether to stop. Running learns end after their step then.

    Returns:
        One report per user, in their order. ``error`` is as in ``learn_many``; "ServingFailed"
        after three workers were lost over the user, "Cancelled" for users without a turn.

    Raises:
        InvalidId: An id is not valid.
        InvalidInput: A user is named twice, a number is out of range, or no worker fits.
        ServingFailed: No worker starts.
        PersonalPeftError: A worker cannot open the home or the base.
    """
    if isinstance(users, str):
        raise InvalidInput("Users must be a list of ids, got one text.", hint="Use a list.")
    if len(set(users)) != len(users):
        raise InvalidInput("Each user must be named once.", hint="Remove the repeated id.")
    for number, name, least in (
        (workers, "workers", 1),
        (at_once, "users at once", 1),
        (cpus, "CPUs", 1),
        (gpus, "GPUs", 0),
    ):
        if not number >= least:
            raise InvalidInput(
                f"The number of {name} must be at least {least}, got {number:g}.",
                hint=f"Use {least} or more.",
            )
    options = OpenOptions.from_process(home, base, backend)
    with options.open_read_only() as runtime:
        for user in users:
            _find_user(runtime, user)
        if not users:
            return ()
        resources = WorkerResources(cpus, gpus)
        with connect_ray(**local_ray_options(min(workers, len(users)), resources)):
            limit = min(workers, max_workers(resources))
            run = _Run(runtime, options, resources, users, limit, at_once, progress)
            return run.run(cancelled)


class _Run:
    def __init__(
        self,
        runtime: Runtime,
        options: OpenOptions,
        resources: WorkerResources,
        users: Sequence[str],
        max_workers: int,
        at_once: int,
        progress: Callable[[RunStatus], None],
    ) -> None:
        self._runtime = runtime
        self._options = options
        self._resources = resources
        self._users = users
        self._max_workers = max_workers
        self._queue = WorkQueue(users, at_once)
        self._progress = progress
        self._workers: list[WorkerHandle] = []
        self._reports: dict[str, LearnReport] = {}
        # The reports in the ledger before a user's first turn.
        self._previous: dict[str, frozenset[tuple[str, str]]] = {}
        self._num_lost = 0
        self._num_failed_starts = 0

    def run(self, cancelled: Callable[[], bool]) -> tuple[LearnReport, ...]:
        """Return the reports, in the order of the users."""
        stopping = False
        try:
            while len(self._reports) < len(self._users):
                if not stopping and cancelled():
                    stopping = True
                    for worker in self._workers:
                        worker.stop()
                if stopping:
                    for user in self._queue.clear():
                        report = _failed(user, "Cancelled", "Stopped before it was their turn.")
                        self._add_report(user, report)
                else:
                    self._assign()
                self._publish_progress()
                if len(self._reports) < len(self._users):
                    for worker in wait_for_results(self._workers, _POLL_SECONDS):
                        self._collect(worker)
            self._publish_progress()
            shutdown([worker for worker in self._workers if worker.is_idle])
        finally:
            for worker in self._workers:
                worker.kill()
        return tuple(self._reports[user] for user in self._users)

    def _assign(self) -> None:
        num_busy = sum(bool(worker.users) for worker in self._workers)
        wanted = min(self._max_workers, self._queue.num_waiting + num_busy)
        while len(self._workers) < wanted:
            self._workers.append(WorkerHandle(self._options, self._resources))
        for worker in self._workers:
            if worker.is_idle and (users := self._queue.take(len(self._workers))):
                for user in users:
                    self._previous.setdefault(user, _recorded_reports(self._runtime, user))
                retried = any(map(self._queue.num_losses, users))
                worker.start_learn(users, _LEASE_SECONDS if retried else 0.0)

    def _collect(self, worker: WorkerHandle) -> None:
        try:
            result = worker.get_result()
        except WorkerLost as reason:
            self._handle_loss(worker, str(reason))
            return
        self._num_failed_starts = 0
        if isinstance(result, PersonalPeftError):
            raise result
        users, worker.users = worker.users, ()
        for user, report in zip(users, result, strict=True):
            self._add_report(user, report)

    def _handle_loss(self, worker: WorkerHandle, reason: str) -> None:
        worker.kill()
        self._workers.remove(worker)
        self._num_lost += 1
        if worker.pid is None:
            self._num_failed_starts += 1
            if self._num_failed_starts == _MAX_FAILED_STARTS:
                raise ServingFailed(
                    f"No worker starts: {reason}.",
                    hint="See the logs of Ray in /tmp/ray/session_latest/logs.",
                )
        for user in self._queue.retry(worker.users):
            text = f"{MAX_LOSSES} workers were lost over it: {reason}. What was done is kept."
            self._add_report(user, _failed(user, "ServingFailed", text))

    def _add_report(self, user: str, report: LearnReport) -> None:
        if self._queue.num_losses(user):
            report = self._merge_recorded(user, report)
        self._reports[user] = report

    def _merge_recorded(self, user: str, last: LearnReport) -> LearnReport:
        """Add what lost workers recorded of a user in this run to the last worker's report."""
        found = _find_user(self._runtime, user)
        reports = found.activity_summary(_MIN_TIME, _MAX_TIME).reports if found else ()
        recorded = [
            report
            for report in reports
            if report.event == "learn" and _key(report) not in self._previous[user]
        ]
        known = set(map(_key, recorded))
        others = [r for r in (replace(last, above=()), *last.above) if _key(r) not in known]
        if recorded:
            others = [report for report in others if report.error != "NothingToLearn"]
        first, *above = [*recorded, *others]
        return replace(first, above=tuple(above))

    def _publish_progress(self) -> None:
        workers = {
            worker.pid: {user: self._training_status(user) for user in worker.users}
            for worker in self._workers
            if worker.pid is not None
        }
        reports = tuple(self._reports.values())
        self._progress(RunStatus(len(self._users), reports, workers, self._num_lost))

    def _training_status(self, user: str) -> TrainingStatus | None:
        found = _find_user(self._runtime, user)
        return found.training_status() if found else None


def _find_user(runtime: Runtime, user: str) -> User | None:
    """Return the user, or None; the user's report has the error then. Raises ``InvalidId``."""
    try:
        return runtime.user(user, create=False)
    except NotFound:
        return None


def _recorded_reports(runtime: Runtime, user: str) -> frozenset[tuple[str, str]]:
    found = _find_user(runtime, user)
    reports = found.reports() if found else ()
    return frozenset((report["layer"], report["at"]) for report in reports)


def _key(report: LearnReport) -> tuple[str, str]:
    return report.layer, report.at.isoformat()


def _failed(user: str, error: str, reason: str) -> LearnReport:
    return LearnReport(
        user=user,
        layer="",
        outcome=LearnOutcome.FAILED,
        reasons=(text_reason(reason),),
        at=datetime.now(UTC),
        seconds=0.0,
        error=error,
    )
