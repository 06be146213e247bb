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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum

from personalpeft.formatting import pluralize
from personalpeft_app.daemon.settings import Settings

QUIET = timedelta(seconds=10)
"""A user counts as present for this long after a reply."""

_ASSUMED_SECONDS = 60.0
_MIN_SECONDS = 1.0
_FAR = datetime.max.replace(tzinfo=UTC)


class TaskKind(StrEnum):
    """Work other than learning, in order of precedence."""

    PROBATION = "probation"
    BACKUP = "backup"
    COLLECT = "collect"
    CLEAN = "clean"
    REPORT = "report"


class Blocker(StrEnum):
    """A condition under which no user learns."""

    POWER = "power"
    TEMPERATURE = "temperature"
    SERVING = "serving"
    LOAD = "load"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Backlog:
    """What one user has to learn.

    Attributes:
        id: The user.
        lessons: How many lessons no learn has considered.
        since: The time of the oldest of them.
        unfinished: Whether a learn ran out of its budget and can go on.
        learned: The time of the last learn that reported something.
        seconds: The mean duration of the last learns, None without any.
    """

    id: str
    lessons: int
    since: datetime | None = None
    unfinished: bool = False
    learned: datetime | None = None
    seconds: float | None = None


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
class History:
    """The seconds of learning today, and the moment for which each task was last done."""

    spent: float = 0.0
    tasks: Mapping[TaskKind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LearnUser:
    """Run a learn of a user, for at most ``seconds`` of training."""

    user: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """Run a task, for the moment that ``key`` names."""

    kind: TaskKind
    key: str
    reason: str


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
    settings: Settings, host: HostState, backlogs: Sequence[Backlog], history: History
) -> Decision:
    """Return what to do now. Call it again after the action."""
    due = [(each, reason) for each in backlogs if (reason := _due(settings, host, each))]
    due.sort(key=lambda each: (not each[0].unfinished, -priority(host, each[0]), each[0].id))
    blocked = _blocked(settings, host, history)
    if not due or blocked is not None:
        task = None if _is_serving(host, QUIET) else _due_task(settings, host, history)
        return Decision(task, _upcoming(settings, host, backlogs, due, blocked))
    (first, reason), *others = due
    learn = LearnUser(first.id, max(_MIN_SECONDS, settings.budget * 60 - history.spent), reason)
    rest = [each for each in backlogs if each != first]
    return Decision(learn, _upcoming(settings, host, rest, others, None))


def priority(host: HostState, backlog: Backlog) -> float:
    """Return lessons per expected second of learning, times one plus the days of waiting.

    The waiting time keeps users who learn slowly from waiting forever.
    """
    waited = max(timedelta(), host.now - backlog.since) if backlog.since else timedelta()
    seconds = max(backlog.seconds or _ASSUMED_SECONDS, 1.0)
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
    return [_moment(today + timedelta(days=days), at, zone) for days in range(-2, 3)]


def _moment(day: date, at: time, zone: tzinfo) -> datetime:
    # fold=0 is the first of two moments, and in a gap the one by the clock before it.
    return datetime.combine(day, at, zone).replace(fold=0).astimezone(UTC)


def _due(settings: Settings, host: HostState, backlog: Backlog) -> str:
    """Return why a user should learn, apart from what blocks everyone; empty without a reason."""
    if backlog.unfinished:
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
    learned = backlog.learned and last_occurrence(at, backlog.learned, host.zone) == last
    return f"{lessons}, and it was {settings.learn_at}" if existed and not learned else ""


def _blocked(settings: Settings, host: HostState, history: History) -> Upcoming | None:
    """Return what keeps every user from learning now, and until when."""

    def wait(blocker: Blocker, reason: str, until: datetime | None = None) -> Upcoming:
        return Upcoming("learning", until, reason, blocker)

    if settings.require_ac_power and host.on_ac_power is False:
        return wait(Blocker.POWER, "waits for mains power")
    if host.temperature is not None and host.temperature >= settings.temperature:
        heat = f"{host.temperature:.0f} °C of {settings.temperature:g}"
        return wait(Blocker.TEMPERATURE, f"waits until it is cooler ({heat})")
    idle = max(timedelta(minutes=settings.idle), QUIET)
    if host.served is not None and _is_serving(host, idle):
        reason = f"waits until {_format_span(idle)} have passed without a request"
        return wait(Blocker.SERVING, reason, host.served + idle)
    if host.other_cpu_load is not None and host.other_cpu_load > settings.load:
        load = f"{host.other_cpu_load:.0%} of {settings.load:.0%}"
        return wait(Blocker.LOAD, f"waits until other programs use less of the processors ({load})")
    if history.spent + _MIN_SECONDS > settings.budget * 60:
        reason = f"the {settings.budget:g} minutes of today are used up"
        return wait(Blocker.BUDGET, reason, next_occurrence(time(0), host.now, host.zone))
    return None


def _is_serving(host: HostState, within: timedelta) -> bool:
    # A distance, not an order: after a clock was set back, the last reply lies in the future.
    return host.served is not None and abs(host.now - host.served) < within


def _due_task(settings: Settings, host: HostState, history: History) -> Task | None:
    for kind in TaskKind:
        if kind is TaskKind.PROBATION:
            last, reason = host.now.replace(minute=0, second=0, microsecond=0), "every hour"
        elif (at := _daily_time(settings, kind)) is not None:
            last, reason = last_occurrence(at, host.now, host.zone), f"every day at {at:%H:%M}"
        else:
            continue
        if history.tasks.get(kind) != (key := last.isoformat()):
            return Task(kind, key, reason)
    return None


def _daily_time(settings: Settings, kind: TaskKind) -> time | None:
    """Return when a daily task runs, None if it is switched off."""
    if kind is TaskKind.BACKUP and not settings.backup:
        return None
    return _time(settings.report_at if kind is TaskKind.REPORT else settings.learn_at or "03:00")


def _upcoming(
    settings: Settings,
    host: HostState,
    backlogs: Sequence[Backlog],
    due: Sequence[tuple[Backlog, str]],
    blocked: Upcoming | None,
) -> tuple[Upcoming, ...]:
    actions = []
    for backlog, reason in due:
        until, why, blocker = None, reason, None
        if blocked is not None:
            until, why, blocker = blocked.at, f"{reason}; {blocked.reason}", blocked.blocked_by
        actions.append(Upcoming(f"{backlog.id} learns", until, why, blocker))
    at, waiting = _time(settings.learn_at), {backlog.id for backlog, _ in due}
    for backlog in backlogs:
        if backlog.lessons and backlog.id not in waiting:
            reason = f"{pluralize(backlog.lessons, 'new lesson')} of {settings.min_signals}"
            when = next_occurrence(at, host.now, host.zone) if at else None
            actions.append(Upcoming(f"{backlog.id} learns", when, reason))
    for kind in TaskKind:
        daily = _daily_time(settings, kind)
        if kind is not TaskKind.PROBATION and daily is not None:
            moment = next_occurrence(daily, host.now, host.zone)
            actions.append(Upcoming(kind, moment, f"every day at {daily:%H:%M}"))
    return tuple(sorted(actions, key=lambda each: each.at or _FAR))


def _time(text: str) -> time | None:
    return time.fromisoformat(text) if text else None


def _format_span(span: timedelta) -> str:
    minutes = span / timedelta(minutes=1)
    return f"{minutes:g} minutes" if minutes >= 1 else f"{span / timedelta(seconds=1):g} seconds"
