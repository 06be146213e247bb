"""Decide what the daemon does now, why, and what comes next. Pure functions of frozen values.

Invariants:

- A learn needs a reason that no learn has considered yet. So no reason leads to two learns, even
  after a kill or at an hour that a clock shows twice.
- A time of day names one moment. Where clocks are set back it is the first of two. Where they are
  set forward it is the one after the gap. A task compares moments for equality and never for order.
  So a clock that is set back makes nothing due again, and one that is set forward blocks nothing.
- Nothing starts during a reply or shortly after one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from enum import StrEnum

from personalpeft.formatting import pluralize
from personalpeft.learning.status import Pending
from personalpeft_app.daemon.journal import Journal, TaskKind
from personalpeft_app.daemon.settings import Settings

QUIET = timedelta(seconds=10)
"""A user counts as present for this long after a reply."""

RETRY = timedelta(hours=1)
"""After this long, the daemon tries again what failed and needs no new reason."""

_ASSUMED_SECONDS = 60.0
_MIN_SECONDS = 1.0
_FAR = datetime.max.replace(tzinfo=UTC)


class Blocker(StrEnum):
    """A condition under which no user learns."""

    POWER = "power"
    TEMPERATURE = "temperature"
    SERVING = "serving"
    LOAD = "load"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class HostState:
    """The clock and the machine. A sensor that is missing reads None and blocks nothing.

    Attributes:
        now: The time in UTC.
        zone: The zone of times of day.
        on_ac_power: Whether the machine runs on mains power.
        other_cpu_load: The share (0 to 1) of all processors that other programs use.
        temperature: The processors' temperature in degrees Celsius.
        served: The time of the last reply.
    """

    now: datetime
    zone: tzinfo
    on_ac_power: bool | None = None
    other_cpu_load: float | None = None
    temperature: float | None = None
    served: datetime | None = None


@dataclass(frozen=True, slots=True)
class LearnUser:
    """Run a learn of a user, for at most ``seconds`` of training."""

    user: str
    seconds: float
    reason: str

    @property
    def name(self) -> str:
        return f"learn {self.user}"


@dataclass(frozen=True, slots=True)
class Task:
    """Run a task, for the moment that ``key`` names."""

    kind: TaskKind
    key: str
    reason: str

    @property
    def name(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A later action. ``at`` is None if its time is unknown; ``blocked_by`` is then the cause."""

    action: str
    at: datetime | None
    reason: str
    blocked_by: Blocker | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The action to take now, None for nothing, and the upcoming ones, the soonest first."""

    action: LearnUser | Task | None
    upcoming: tuple[Upcoming, ...] = ()


def plan(
    settings: Settings, host: HostState, backlogs: Sequence[Pending], journal: Journal
) -> Decision:
    """Return what to do now. Call it again after the action."""
    due = [(each, reason) for each in backlogs if (reason := _due(settings, host, each))]
    due.sort(key=lambda each: (not each[0].is_unfinished, -priority(host, each[0]), each[0].user))
    tasks = _due_tasks(settings, host, journal)
    retries = _retries(host, journal, tasks)
    blocked = _blocked(settings, host, journal)
    serving = None
    action: LearnUser | Task | None = None
    if due and blocked is None:
        (learner, reason), *due = due
        left = settings.budget * 60 - journal.spent_on(host.now, host.zone)
        action = LearnUser(learner.user, max(_MIN_SECONDS, left), reason)
        backlogs = [each for each in backlogs if each != learner]
    elif (serving := _wait_for_quiet(host, QUIET)) is None and tasks:
        action, *tasks = tasks
    waiting = [_waiting(task.kind, task.reason, serving) for task in tasks] + retries
    return Decision(action, _upcoming(settings, host, backlogs, due, blocked, waiting))


def priority(host: HostState, backlog: Pending) -> float:
    """Return lessons per expected second of learning, times one plus the days of waiting.

    The waiting time keeps users who learn slowly from waiting forever.
    """
    waited = max(timedelta(), host.now - backlog.since) if backlog.since else timedelta()
    seconds = max(backlog.mean_build_seconds or _ASSUMED_SECONDS, 1.0)
    return backlog.lessons * (1 + waited / timedelta(days=1)) / seconds


def last_occurrence(at: time, now: datetime, zone: tzinfo) -> datetime:
    """Return the last moment, up to now, at which it was that time of day."""
    # Tomorrow counts too: clocks set back over midnight give the later moment the earlier date.
    return max(moment for moment in _occurrences(at, now, zone) if moment <= now)


def next_occurrence(at: time, now: datetime, zone: tzinfo) -> datetime:
    """Return the next moment, after now, at which it is that time of day."""
    return min(moment for moment in _occurrences(at, now, zone) if moment > now)


def _occurrences(at: time, now: datetime, zone: tzinfo) -> list[datetime]:
    today = now.astimezone(zone).date()
    days = (today + timedelta(days=number) for number in range(-2, 3))
    # fold=0 is the first of two moments, and in a gap the one by the clock before it.
    return [datetime.combine(day, at, zone).replace(fold=0).astimezone(UTC) for day in days]


def _due(settings: Settings, host: HostState, backlog: Pending) -> str:
    """Return why a user should learn, apart from what blocks everyone; empty without a reason."""
    if backlog.is_unfinished:
        return "a learn that ran out of its time goes on"
    lessons = pluralize(backlog.lessons, "new lesson")
    if backlog.lessons >= settings.min_signals:
        return f"{lessons}, and {settings.min_signals} are enough"
    at = _time(settings.learn_at)
    if backlog.lessons < 1 or at is None:
        return ""
    last = last_occurrence(at, host.now, host.zone)
    # A date in the future comes from before the clock was set back: the lesson existed then.
    existed = backlog.since is None or backlog.since <= last or backlog.since > host.now
    learned = (
        backlog.last_learned_at and last_occurrence(at, backlog.last_learned_at, host.zone) == last
    )
    return f"{lessons}, and it was {settings.learn_at}" if existed and not learned else ""


def _blocked(settings: Settings, host: HostState, journal: Journal) -> Upcoming | None:
    """Return what keeps every user from learning now, and until when."""

    def wait(blocker: Blocker, reason: str, until: datetime | None = None) -> Upcoming:
        return Upcoming("learning", until, reason, blocker)

    if settings.require_ac_power and host.on_ac_power is False:
        return wait(Blocker.POWER, "waits for mains power")
    if host.temperature is not None and host.temperature >= settings.temperature:
        heat = f"{host.temperature:.0f} °C of {settings.temperature:g}"
        return wait(Blocker.TEMPERATURE, f"waits until it is cooler ({heat})")
    serving = _wait_for_quiet(host, max(timedelta(minutes=settings.idle), QUIET))
    if serving is not None:
        return serving
    if host.other_cpu_load is not None and host.other_cpu_load > settings.load:
        load = f"{host.other_cpu_load:.0%} of {settings.load:.0%}"
        return wait(Blocker.LOAD, f"waits until other programs use less of the processors ({load})")
    if journal.spent_on(host.now, host.zone) + _MIN_SECONDS > settings.budget * 60:
        reason = f"the {settings.budget:g} minutes of today are used up"
        return wait(Blocker.BUDGET, reason, next_occurrence(time(0), host.now, host.zone))
    return None


def _wait_for_quiet(host: HostState, idle: timedelta) -> Upcoming | None:
    """Return what keeps everything waiting until ``idle`` has passed since the last reply."""
    # A distance, not an order: after a clock was set back, the last reply lies in the future.
    if host.served is None or abs(host.now - host.served) >= idle:
        return None
    reason = f"waits until {_format_span(idle)} have passed without a request"
    return Upcoming("everything", host.served + idle, reason, Blocker.SERVING)


def _due_tasks(settings: Settings, host: HostState, journal: Journal) -> list[Task]:
    """Return the tasks that are due, in order of precedence."""
    due = []
    for kind in TaskKind:
        if kind is TaskKind.PROBATION:
            last, reason = host.now.replace(minute=0, second=0, microsecond=0), "every hour"
        elif (at := _daily_time(settings, kind)) is not None:
            last, reason = last_occurrence(at, host.now, host.zone), f"every day at {at:%H:%M}"
        else:
            continue
        key, failed = last.isoformat(), journal.failed.get(kind)
        waits = failed is not None and failed.key == key and abs(host.now - failed.at) < RETRY
        if journal.tasks.get(kind) != key and not waits:
            due.append(Task(kind, key, reason))
    return due


def _retries(host: HostState, journal: Journal, due: Sequence[Task]) -> list[Upcoming]:
    """Return the failed tasks that are tried again later."""
    names = {task.kind for task in due}
    return [
        Upcoming(name, each.at + RETRY, "the last try failed")
        for name, each in journal.failed.items()
        if name not in names and abs(host.now - each.at) < RETRY
    ]


def _waiting(action: str, reason: str, blocked: Upcoming | None) -> Upcoming:
    """Return an action that is due and waits: for what blocks it, else for the one before it."""
    if blocked is None:
        return Upcoming(action, None, reason)
    return Upcoming(action, blocked.at, f"{reason}; {blocked.reason}", blocked.blocked_by)


def _daily_time(settings: Settings, kind: TaskKind) -> time | None:
    """Return when a daily task runs, None if it is switched off."""
    if kind is TaskKind.BACKUP and not settings.backup:
        return None
    return _time(settings.report_at if kind is TaskKind.REPORT else settings.learn_at or "03:00")


def _upcoming(
    settings: Settings,
    host: HostState,
    backlogs: Sequence[Pending],
    due: Sequence[tuple[Pending, str]],
    blocked: Upcoming | None,
    tasks: Sequence[Upcoming],
) -> tuple[Upcoming, ...]:
    """Return what comes next, the soonest first. ``due`` learns and ``tasks`` wait already."""
    actions = [
        *tasks,
        *(_waiting(f"{backlog.user} learns", reason, blocked) for backlog, reason in due),
    ]
    at, named = _time(settings.learn_at), {each.action for each in actions}
    for backlog in backlogs:
        if backlog.lessons and f"{backlog.user} learns" not in named:
            reason = f"{pluralize(backlog.lessons, 'new lesson')} of {settings.min_signals}"
            when = next_occurrence(at, host.now, host.zone) if at else None
            actions.append(Upcoming(f"{backlog.user} learns", when, reason))
    for kind in TaskKind:
        daily = _daily_time(settings, kind)
        if kind is not TaskKind.PROBATION and kind not in named and daily is not None:
            moment = next_occurrence(daily, host.now, host.zone)
            actions.append(Upcoming(kind, moment, f"every day at {daily:%H:%M}"))
    return tuple(sorted(actions, key=lambda each: each.at or _FAR))


def _time(text: str) -> time | None:
    return time.fromisoformat(text) if text else None


def _format_span(span: timedelta) -> str:
    minutes = span / timedelta(minutes=1)
    return f"{minutes:g} minutes" if minutes >= 1 else f"{span / timedelta(seconds=1):g} seconds"
