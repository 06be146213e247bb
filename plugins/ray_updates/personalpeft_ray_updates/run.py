"""One run: send users' bundles to nodes, record the results at home, and report.

Invariants:

- A user learns once from each signal, however many nodes die. A result is recorded in one
  transaction, and only if the head has not moved since the bundle was made.
- Every user has one report. An error of one user stops no other; an error of all is raised.
- The home is open in this process alone. No node reads or writes it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import personalpeft
from personalpeft import (
    DEFAULT_BASE,
    CardError,
    HomeError,
    InvalidInput,
    LearnReport,
    PersonalPeftError,
    Runtime,
)
from personalpeft.base_models.model_card import read_card
from personalpeft.base_models.registry import is_path
from personalpeft.errors import get_error_type
from personalpeft.ids import check_user_id
from personalpeft.learning.outcomes import LearnOutcome, text_reason
from personalpeft_ray_updates.cluster import (
    Cluster,
    NodeRefusal,
    Task,
    TaskLost,
    TaskResources,
    TaskStopped,
    connect_ray,
    wait_for_tasks,
)

_POLL_SECONDS = 0.5
# Seconds that running learns get to end after their step, once the caller stops.
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a process on a node does now: for which users, the stage, and its share that is done."""

    node: str
    pid: int
    users: tuple[str, ...]
    stage: str
    done: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run.

    Attributes:
        users: How many users it has in all.
        reports: The reports so far, in the order in which they came.
        workers: The processes that learn now.
        lost: How many processes or nodes died during a learn.
        refusals: By id, why a node cannot learn for this home.
    """

    users: int
    reports: tuple[LearnReport, ...]
    workers: tuple[WorkerStatus, ...]
    lost: int
    refusals: Mapping[str, str]


def learn_on_cluster(
    users: Sequence[str],
    *,
    home: str | Path | None = None,
    base: str | Path = DEFAULT_BASE,
    backend: str = "torch",
    workers: int = 2,
    at_once: int = 1,
    cpus: int = 1,
    gpus: float = 0.0,
    retries: int = 3,
    max_bundle_mb: float = 1024.0,
    progress: Callable[[RunStatus], None] = lambda status: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[LearnReport, ...]:
    """Learn for users of one home on the nodes of a Ray cluster.

    The nodes are those of the Ray that this program is connected to. Without one, a new Ray is
    started on this machine and ended afterwards. A node gets a user's ledger and adapters as bytes,
    learns with the base that it has, and returns what this process records in the home.

    Args:
        users: Ids of users, each once.
        home: As for ``personalpeft.open``; it must exist.
        base: As for ``personalpeft.open``. The nodes need the same base, by its digest.
        backend: As for ``personalpeft.open``, on the nodes too.
        workers: The most learns at once, each in a process that loads the base.
        at_once: Users that learn in one pass of a process. 1 gives the bytes of learning alone.
        cpus: CPUs of a node for a process.
        gpus: GPUs of a node for a process; a share is allowed.
        retries: How often a learn starts again after its process or node died.
        max_bundle_mb: The most MB of a user's ledger and adapters. Larger users are not sent.
        progress: Called about twice a second in the caller's thread.
        cancelled: Whether to stop. Running learns end after their step then, and are dropped.

    Returns:
        One report per user, in their order. ``error`` is as in ``learn_many``; "ServingFailed"
        where all retries died, "LedgerMoved" where the result did not fit any more, "Cancelled" for
        users without a turn.

    Raises:
        InvalidId: An id is not valid.
        InvalidInput: A user is named twice, a number is out of range, or no worker fits on a node.
        BaseMismatch: No node has the base.
        BuildMismatch: No node has the same version, card and extras.
        PersonalPeftError: The home or the base cannot be opened, here or on any node.
    """
    if isinstance(users, str):
        raise InvalidInput("Users must be a list of ids, got one text.", hint="Use a list.")
    for user in users:
        check_user_id(user)
    if len(set(users)) != len(users):
        raise InvalidInput("Each user must be named once.", hint="Remove the repeated id.")
    for number, name, least in (
        (workers, "workers", 1),
        (at_once, "users at once", 1),
        (cpus, "CPUs", 1),
        (gpus, "GPUs", 0),
        (retries, "retries", 0),
        (max_bundle_mb, "MB of a bundle", 1),
    ):
        if not number >= least:
            raise InvalidInput(
                f"The number of {name} must be at least {least}, got {number:g}.",
                hint=f"Use {least} or more.",
            )
    # A home that is missing is an error and is not created.
    personalpeft.open(home, base, backend, read_only=True).close()
    with personalpeft.open(home, base, backend) as runtime:
        runtime.base()
        if not users:
            return ()
        resources = TaskResources(cpus, gpus, retries)
        with connect_ray(num_cpus=min(workers, len(users)) * cpus):
            cluster = Cluster(_base_for_nodes(runtime, base), backend, resources)
            run = _Run(runtime, cluster, users, workers, at_once, max_bundle_mb, progress)
            try:
                return run.run(cancelled)
            finally:
                cluster.close()


class _Run:
    def __init__(
        self,
        runtime: Runtime,
        cluster: Cluster,
        users: Sequence[str],
        max_tasks: int,
        at_once: int,
        max_bundle_mb: float,
        progress: Callable[[RunStatus], None],
    ) -> None:
        self._runtime, self._cluster, self._users = runtime, cluster, users
        self._max_tasks = max_tasks
        self._max_bundle_bytes = int(max_bundle_mb * 1e6)
        self._progress = progress
        # Groups of users that learn in one pass.
        self._waiting = deque(_groups(users, at_once, max_tasks))
        self._running: dict[Task, tuple[str, ...]] = {}
        self._names = map(str, itertools.count(1))
        self._reports: dict[str, LearnReport] = {}
        # By task, how many processes died.
        self._lost: dict[str, int] = {}

    def run(self, cancelled: Callable[[], bool]) -> tuple[LearnReport, ...]:
        """Return the reports, in the order of the users."""
        deadline: float | None = None
        try:
            while len(self._reports) < len(self._users):
                if deadline is None and cancelled():
                    deadline = time.monotonic() + _STOP_SECONDS
                    self._cluster.stop()
                if deadline is None:
                    self._submit()
                else:
                    # Also users of a task that was refused or lost since.
                    while self._waiting:
                        self._report_stopped(self._waiting.popleft())
                    if time.monotonic() > deadline:
                        self._cancel_all()
                self._report_progress()
                if self._running:
                    for task in wait_for_tasks(list(self._running), _POLL_SECONDS):
                        self._collect(task)
            self._report_progress()
        finally:
            self._cancel_all()
        return tuple(self._reports[user] for user in self._users)

    def _submit(self) -> None:
        while self._waiting and len(self._running) < self._max_tasks:
            bundles: dict[str, bytes] = {}
            for user in self._waiting.popleft():
                try:
                    bundles[user] = self._make_bundle(user)
                except HomeError:
                    raise
                except PersonalPeftError as error:
                    self._reports[user] = _failed(user, error)
            if bundles:
                task = self._cluster.submit(next(self._names), list(bundles.values()))
                self._running[task] = tuple(bundles)

    def _make_bundle(self, user: str) -> bytes:
        bundle = self._runtime.user(user, create=False).bundle_learn()
        if len(bundle) > self._max_bundle_bytes:
            raise InvalidInput(
                f"The ledger and adapters of {user} are {len(bundle) / 1e6:.1f} MB, and "
                f"{self._max_bundle_bytes / 1e6:g} MB are allowed.",
                hint="Allow more MB for a bundle, or learn for this user at home.",
            )
        return bundle

    def _collect(self, task: Task) -> None:
        users = self._running.pop(task)
        try:
            results = task.get_results()
            if len(results) != len(users):
                raise TaskLost("its answer has another number of results")
        except NodeRefusal as refusal:
            self._cluster.refuse(refusal)
            self._waiting.appendleft(users)
        except TaskStopped:
            self._report_stopped(users)
        except (TaskLost, PersonalPeftError) as error:
            if len(users) > 1:
                # It may be the fault of one of them.
                self._waiting.extend((user,) for user in users)
            else:
                self._reports[users[0]] = _failed(users[0], error)
        else:
            for user, result in zip(users, results, strict=True):
                self._reports[user] = self._record_result(user, result)

    def _record_result(self, user: str, result: bytes) -> LearnReport:
        """Record a result, or drop it and report why."""
        try:
            return self._runtime.user(user, create=False).apply_learn(result)
        except HomeError:
            raise
        except PersonalPeftError as error:
            return _failed(user, error)

    def _report_stopped(self, users: Sequence[str]) -> None:
        stopped = personalpeft.Cancelled(
            "Stopped before it was learned.", hint="The next run learns it."
        )
        for user in users:
            self._reports[user] = _failed(user, stopped)

    def _cancel_all(self) -> None:
        for task, users in self._running.items():
            task.cancel()
            self._report_stopped(users)
        self._running.clear()

    def _report_progress(self) -> None:
        attempts = self._cluster.attempts()
        self._lost |= {name: attempt.number - 1 for name, attempt in attempts.items()}
        workers = tuple(
            WorkerStatus(attempt.node, attempt.pid, users, attempt.stage, attempt.done)
            for task, users in self._running.items()
            if (attempt := attempts.get(task.name)) is not None
        )
        refusals = {id_: error.message for id_, error in self._cluster.refusals.items()}
        reports = tuple(self._reports.values())
        lost = sum(self._lost.values())
        self._progress(RunStatus(len(self._users), reports, workers, lost, refusals))


def _groups(users: Sequence[str], at_once: int, max_tasks: int) -> list[tuple[str, ...]]:
    """Return groups of at most ``at_once``, and smaller ones where tasks would be idle."""
    size = max(1, min(at_once, -(-len(users) // max_tasks)))
    return [tuple(users[first : first + size]) for first in range(0, len(users), size)]


def _base_for_nodes(runtime: Runtime, base: str | Path) -> str:
    """Return the name of a shipped card as it is, and the place of anything else as a full path.

    Nodes have another working folder, and their homes have no cards.
    """
    if isinstance(base, Path) or is_path(base):
        return str(Path(base).expanduser().absolute())
    for card in (runtime.settings.home / "models").glob("*.toml"):
        # A mistake in one card does not keep the others from being opened.
        with suppress(CardError):
            if read_card(card).name == base:
                return str(card.absolute())
    return base


def _failed(user: str, error: Exception) -> LearnReport:
    if isinstance(error, PersonalPeftError):
        kind, text = get_error_type(error).__name__, f"{error.message} {error.hint}".strip()
    else:
        kind = "ServingFailed"
        text = f"Its learn was lost on every try: {error}. The next run tries again."
    return LearnReport(
        user=user,
        layer="",
        outcome=LearnOutcome.FAILED,
        reasons=(text_reason(text),),
        at=datetime.now(UTC),
        seconds=0.0,
        error=kind,
    )
