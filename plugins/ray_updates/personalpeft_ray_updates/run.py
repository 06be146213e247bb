"""One run: hands users to workers as these come free, hears what came of them, and hands them out again where a worker was lost.

Invariants:

- A user learns once for each lesson, however many workers are lost and whoever learns on the same home at that time: a
  learn holds the user's lease, publishes in one transaction, and has nothing to learn after that.
- What a lost worker had published is told out of the ledger. So of a user who was published and then found with nothing left
  to learn the report is the publication.
- Every user has one report. What one cannot do stops nobody else; what would stop everybody is raised.
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
    Hand,
    Lost,
    Means,
    connected,
    dismiss,
    enough,
    room,
    wait,
)
from personalpeft_ray_updates.rota import MOST_LOSSES, Rota
from personalpeft_ray_updates.worker import Opening

# Seconds between two looks at how things are.
_LOOK = 0.5
# Seconds that a user's lease is waited for where a worker was lost over them: the system may just be letting go of it.
_PATIENCE = 10.0
# So many workers in a row that are lost before they do anything are no accident.
_MOST_FALSE_STARTS = 3
_EVER = datetime.min.replace(tzinfo=UTC)
_FOR_EVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run is doing: how many ``users`` it has in all, the ``reports`` of who is done, in the order in which they came, who is
    with which worker (by process id) and what is learned for them at this moment, and how many workers were ``lost``.
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
    progress: Callable[[Standing], None] = lambda standing: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[LearnReport, ...]:
    """As ``Runtime.learn_many`` for users of one home, by several processes: one report for each, in the same order.

    ``home``, ``base`` and ``backend`` are as for ``personalpeft.open``; the home has to be there. Each worker loads the
    base once, and takes ``cpus`` and ``gpus`` of this machine, on which all of them run; up to ``at_once`` users learn in one pass
    there. Where fewer workers fit, there are fewer. They are those of the Ray that this program is connected to; where it is to
    none, one is started on this machine and ended afterwards.

    What a user cannot do is their report, with ``error`` as in ``learn_many``; "ServingFailed" where three workers were lost over
    them. ``progress`` hears how things are about twice a second, in the thread of the caller. Once ``cancelled`` says so, each learn
    ends after its step, and who is not done is reported as "Cancelled". That, an exception and a kill of anything lose no step that
    was saved: the next learn of the user, here or elsewhere, goes on from it. Raises ``InvalidId``; ``InvalidInput`` where a user is
    named twice, where a number is out of range and where no worker fits; ``ServingFailed`` where no worker comes up; and whatever
    keeps a worker from opening the home and the base.
    """
    if isinstance(users, str):
        raise InvalidInput("One text is no list of users.", hint="Give a list of ids.")
    if len(set(users)) != len(users):
        raise InvalidInput("A user is named twice.", hint="Name each user once.")
    for number, what, least in (
        (workers, "workers", 1),
        (at_once, "users at once", 1),
        (cpus, "CPUs", 1),
        (gpus, "GPUs", 0),
    ):
        if not number >= least:
            raise InvalidInput(f"There cannot be {number:g} {what}.", hint=f"Give {least} or more.")
    opening = Opening.here(home, base, backend)
    with opening.to_look() as runtime:
        for user in users:
            _found(runtime, user)
        if not users:
            return ()
        means = Means(cpus, gpus)
        with connected(**enough(min(workers, len(users)), means)):
            return _Run(
                runtime, opening, means, users, min(workers, room(means)), at_once, progress
            ).until(cancelled)


class _Run:
    def __init__(
        self,
        runtime: Runtime,
        opening: Opening,
        means: Means,
        users: Sequence[str],
        workers: int,
        at_once: int,
        progress: Callable[[Standing], None],
    ) -> None:
        self._runtime = runtime
        self._opening = opening
        self._means = means
        self._users = users
        self._most = workers
        self._rota = Rota(users, at_once)
        self._progress = progress
        self._hands: list[Hand] = []
        self._reports: dict[str, LearnReport] = {}
        # What the ledger had of each user before they were first handed out.
        self._before: dict[str, frozenset[tuple[str, str]]] = {}
        self._lost = 0
        self._false_starts = 0

    def until(self, cancelled: Callable[[], bool]) -> tuple[LearnReport, ...]:
        """The reports, in the order in which the users were named."""
        stopping = False
        try:
            while len(self._reports) < len(self._users):
                if not stopping and cancelled():
                    stopping = True
                    for hand in self._hands:
                        hand.stop()
                if stopping:
                    for user in self._rota.send_away():
                        self._done(
                            user, _not_done(user, "Cancelled", "Stopped before it was their turn.")
                        )
                else:
                    self._hand_out()
                self._tell()
                for hand in (
                    wait(self._hands, _LOOK) if len(self._reports) < len(self._users) else ()
                ):
                    self._hear(hand)
            self._tell()
            dismiss([hand for hand in self._hands if hand.idle])
        finally:
            for hand in self._hands:
                hand.kill()
        return tuple(self._reports[user] for user in self._users)

    def _hand_out(self) -> None:
        wanted = min(self._most, self._rota.waiting + sum(bool(hand.users) for hand in self._hands))
        while len(self._hands) < wanted:
            self._hands.append(Hand(self._opening, self._means))
        for hand in self._hands:
            if hand.idle and (users := self._rota.take(len(self._hands))):
                for user in users:
                    self._before.setdefault(user, _recorded(self._runtime, user))
                hand.learn(users, _PATIENCE if any(map(self._rota.losses, users)) else 0.0)

    def _hear(self, hand: Hand) -> None:
        try:
            said = hand.heard()
        except Lost as why:
            self._lose(hand, str(why))
            return
        self._false_starts = 0
        if isinstance(said, PersonalPeftError):
            raise said
        users, hand.users = hand.users, ()
        for user, report in zip(users, said, strict=True):
            self._done(user, report)

    def _lose(self, hand: Hand, why: str) -> None:
        hand.kill()
        self._hands.remove(hand)
        self._lost += 1
        if hand.pid is None:
            self._false_starts += 1
            if self._false_starts == _MOST_FALSE_STARTS:
                raise ServingFailed(
                    f"No worker comes up: {why}.",
                    hint="The logs of Ray have the details; they lie in /tmp/ray/session_latest/logs.",
                )
        for user in self._rota.lost(hand.users):
            reason = f"{MOST_LOSSES} workers were lost over it: {why}. What was done is kept."
            self._done(user, _not_done(user, "ServingFailed", reason))

    def _done(self, user: str, report: LearnReport) -> None:
        self._reports[user] = (
            self._with_recorded(user, report) if self._rota.losses(user) else report
        )

    def _with_recorded(self, user: str, last: LearnReport) -> LearnReport:
        """All that was recorded of a user in this run, and of what the last worker said that which was not."""
        found = _found(self._runtime, user)
        told = found.activity_summary(_EVER, _FOR_EVER).reports if found else ()
        recorded = [
            each for each in told if each.event == "learn" and _key(each) not in self._before[user]
        ]
        known = set(map(_key, recorded))
        others = [
            each for each in (replace(last, above=()), *last.above) if _key(each) not in known
        ]
        if recorded:
            others = [each for each in others if each.error != "NothingToLearn"]
        first, *above = [*recorded, *others]
        return replace(first, above=tuple(above))

    def _tell(self) -> None:
        workers = {
            hand.pid: {user: self._learning(user) for user in hand.users}
            for hand in self._hands
            if hand.pid is not None
        }
        self._progress(
            Standing(len(self._users), tuple(self._reports.values()), workers, self._lost)
        )

    def _learning(self, user: str) -> TrainingStatus | None:
        found = _found(self._runtime, user)
        return found.training_status() if found else None


def _found(runtime: Runtime, user: str) -> User | None:
    """The user; None where there is none of that name, which a report says later. Raises ``InvalidId``."""
    try:
        return runtime.user(user, create=False)
    except NotFound:
        return None


def _recorded(runtime: Runtime, user: str) -> frozenset[tuple[str, str]]:
    """Which reports the ledger has of a user."""
    found = _found(runtime, user)
    return (
        frozenset((report["layer"], report["at"]) for report in found.reports())
        if found
        else frozenset()
    )


def _key(report: LearnReport) -> tuple[str, str]:
    return report.layer, report.at.isoformat()


def _not_done(user: str, error: str, reason: str) -> LearnReport:
    return LearnReport(
        user=user,
        layer="",
        outcome=LearnOutcome.FAILED,
        reasons=(text_reason(reason),),
        at=datetime.now(UTC),
        seconds=0.0,
        error=error,
    )
