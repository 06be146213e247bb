"""What to do now, why, and what comes next: of frozen values alone, so that every story of clocks and machines can be told.

Invariants:

- Nothing is learned but for a reason that no learn has considered, so the same reason never leads to a second learn: not
  after a kill, not at an hour that a clock shows twice.
- A time of day is a moment: the first of its kind where an hour comes twice, the one after the gap where it does not come at
  all. What is asked of a moment is whether it is the same as then, never whether it is later: a clock that was set back
  makes nothing due again and one that was set forward blocks nothing.
- While a person is being answered, or was a moment ago, nothing begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum

from personalpeft.formatting import pluralize
from personalpeft_app.daemon.settings import Settings, time_of_day

QUIET = timedelta(seconds=10)
"""So long after a reply whoever was answered is still thought to be there."""

# A learn of somebody who never learned here is thought to take so long.
_GUESS = 60.0
_LEAST = 1.0


class TaskKind(StrEnum):
    """What is done beside learning, in this order."""

    PROBATION = "probation"
    BACKUP = "backup"
    COLLECT = "collect"
    CLEAN = "clean"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the ledger says of one user: ``lessons`` that no learn has considered, the oldest from ``since``; whether a learn
    that its budget ended ``goes_on``; ``learned``: when a learn last said something; ``seconds`` that the last learns took
    on average (None: there was none).
    """

    id: str
    lessons: int
    since: datetime | None = None
    unfinished: bool = False
    learned: datetime | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """How things are: ``now`` in UTC, the ``zone`` of the person's day; what the machine says (None: it does not): on
    ``mains``, the share of its processors that ``others`` use, its ``temperature``; when a person was last ``served``.
    """

    now: datetime
    zone: tzinfo
    on_ac_power: bool | None = None
    other_cpu_load: float | None = None
    temperature: float | None = None
    served: datetime | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What was done already: ``spent`` seconds of learning today, and for which moment each chore was last done."""

    spent: float = 0.0
    tasks: Mapping[TaskKind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LearnUser:
    """Have a user learn, for at most so many ``seconds`` of training."""

    user: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """Do a chore, for the moment that ``key`` names."""

    kind: TaskKind
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Upcoming:
    """What comes next; ``at`` is None where no clock tells when."""

    action: str
    at: datetime | None
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """``act`` is what to do now; None: nothing. ``coming`` is what comes next, the soonest first."""

    action: LearnUser | Task | None
    upcoming: tuple[Upcoming, ...] = ()


def plan(
    settings: Settings, moment: HostState, people: Sequence[Backlog], past: History
) -> Decision:
    """What to do now. After it was done, ask again with the facts as they are then."""
    due = sorted(
        ((person, why) for person in people if (why := _due(settings, moment, person))),
        key=lambda each: (not each[0].unfinished, -priority(moment, each[0]), each[0].id),
    )
    hindered = _blocked_by(settings, moment, past)
    if due and hindered is None:
        (person, why), *others = due
        coming = _upcoming(
            settings, moment, [each for each in people if each != person], others, hindered
        )
        return Decision(
            LearnUser(person.id, max(_LEAST, settings.budget * 60 - past.spent), why), coming
        )
    chore = _due_task(settings, moment, past)
    coming = _upcoming(settings, moment, people, due, hindered)
    return Decision(None if _is_serving(moment, QUIET) else chore, coming)


def priority(moment: HostState, person: Backlog) -> float:
    """Lessons for each second that learning them is expected to take, times one more for each day that the oldest has waited:
    so whoever learns slowly has their turn too.
    """
    waited = max(timedelta(), moment.now - person.since) if person.since else timedelta()
    return person.lessons * (1 + waited / timedelta(days=1)) / max(person.seconds or _GUESS, 1.0)


def last_occurrence(at: time, now: datetime, zone: tzinfo) -> datetime:
    """The last moment, until now, at which it was that time of day."""
    today = now.astimezone(zone).date()
    # Tomorrow too: where clocks are set back over midnight, the later of two moments can have the earlier date.
    moments = [_on(today + timedelta(days=days), at, zone) for days in (1, 0, -1, -2)]
    return max(moment for moment in moments if moment <= now)


def next_occurrence(at: time, now: datetime, zone: tzinfo) -> datetime:
    """The next moment, after now, at which it is that time of day."""
    today = now.astimezone(zone).date()
    moments = [_on(today + timedelta(days=days), at, zone) for days in (-1, 0, 1, 2)]
    return min(moment for moment in moments if moment > now)


def _on(day: date, at: time, zone: tzinfo) -> datetime:
    # fold=0 is the first of two, and where there is none, that of the clock that was not set forward yet.
    return datetime.combine(day, at, zone).replace(fold=0).astimezone(UTC)


def _due(settings: Settings, moment: HostState, person: Backlog) -> str:
    """Why somebody should learn, if the moment were right; empty where they should not."""
    if person.unfinished:
        return "a learn that ran out of its time goes on"
    if person.lessons >= settings.min_signals:
        return f"{pluralize(person.lessons, 'new lesson')}, and {settings.min_signals} are enough"
    at = time_of_day(settings.learn_at)
    if person.lessons < 1 or at is None:
        return ""
    last = last_occurrence(at, moment.now, moment.zone)
    # What has a date that is still to come was said before a clock was set back: it was there at that time of day.
    was_there = person.since is None or person.since <= last or person.since > moment.now
    once = person.learned is None or last_occurrence(at, person.learned, moment.zone) != last
    return (
        f"{pluralize(person.lessons, 'new lesson')}, and it was {settings.learn_at}"
        if was_there and once
        else ""
    )


def _blocked_by(settings: Settings, moment: HostState, past: History) -> Upcoming | None:
    """What keeps everybody from learning now, and until when."""
    if settings.require_ac_power and moment.on_ac_power is False:
        return Upcoming("learning", None, "waits for mains power")
    if moment.temperature is not None and moment.temperature >= settings.temperature:
        why = f"waits until it is cooler ({moment.temperature:.0f} °C of {settings.temperature:g})"
        return Upcoming("learning", None, why)
    idle = max(timedelta(minutes=settings.idle), QUIET)
    if moment.served is not None and _is_serving(moment, idle):
        return Upcoming(
            "learning",
            moment.served + idle,
            f"waits until nobody has asked anything for {_minutes(idle)}",
        )
    if moment.other_cpu_load is not None and moment.other_cpu_load > settings.load:
        why = f"waits until others use less of the processors ({moment.other_cpu_load:.0%} of {settings.load:.0%})"
        return Upcoming("learning", None, why)
    if past.spent + _LEAST > settings.budget * 60:
        why = f"the {settings.budget:g} minutes of today are used up"
        return Upcoming("learning", next_occurrence(time(0), moment.now, moment.zone), why)
    return None


def _is_serving(moment: HostState, within: timedelta) -> bool:
    # The distance, not the order: after a clock was set back, what was a minute ago has a date that is still to come.
    return moment.served is not None and abs(moment.now - moment.served) < within


def _due_task(settings: Settings, moment: HostState, past: History) -> Task | None:
    for kind in TaskKind:
        found = _next_time_of(settings, moment, kind)
        if found is None:
            continue
        last, because = found
        if past.tasks.get(kind) != (key := last.isoformat()):
            return Task(kind, key, because)
    return None


def _next_time_of(
    settings: Settings, moment: HostState, kind: TaskKind
) -> tuple[datetime, str] | None:
    """The last moment at which a chore was to be done, and when that is, in words; None: it is switched off."""
    if kind is TaskKind.PROBATION:
        return moment.now.replace(minute=0, second=0, microsecond=0), "every hour"
    if kind is TaskKind.BACKUP and not settings.backup:
        return None
    at = time_of_day(
        settings.report_at if kind is TaskKind.REPORT else settings.learn_at or "03:00"
    )
    if at is None:
        return None
    return last_occurrence(at, moment.now, moment.zone), f"every day at {at:%H:%M}"


def _upcoming(
    settings: Settings,
    moment: HostState,
    people: Sequence[Backlog],
    due: Sequence[tuple[Backlog, str]],
    hindered: Upcoming | None,
) -> tuple[Upcoming, ...]:
    found: list[Upcoming] = []
    for person, why in due:
        until, because = (
            (None, why) if hindered is None else (hindered.at, f"{why}; {hindered.reason}")
        )
        found.append(Upcoming(f"{person.id} learns", until, because))
    at, waiting = time_of_day(settings.learn_at), {person.id for person, _ in due}
    for person in people:
        if person.lessons and person.id not in waiting:
            missing = f"{pluralize(person.lessons, 'new lesson')} of the {settings.min_signals} that are enough at any time"
            found.append(
                Upcoming(
                    f"{person.id} learns",
                    next_occurrence(at, moment.now, moment.zone) if at else None,
                    missing,
                )
            )
    for kind in TaskKind:
        when = time_of_day(
            settings.report_at if kind is TaskKind.REPORT else settings.learn_at or "03:00"
        )
        if (
            kind is not TaskKind.PROBATION
            and when is not None
            and (kind is not TaskKind.BACKUP or settings.backup)
        ):
            found.append(
                Upcoming(
                    kind,
                    next_occurrence(when, moment.now, moment.zone),
                    f"every day at {when:%H:%M}",
                )
            )
    far = datetime.max.replace(tzinfo=UTC)
    return tuple(sorted(found, key=lambda each: each.at or far))


def _minutes(span: timedelta) -> str:
    minutes = span / timedelta(minutes=1)
    return f"{minutes:g} minutes" if minutes >= 1 else f"{span / timedelta(seconds=1):g} seconds"
