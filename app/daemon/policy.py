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


class Kind(StrEnum):
    """What is done beside learning, in this order."""

    PROBATION = "probation"
    BACKUP = "backup"
    COLLECT = "collect"
    CLEAN = "clean"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Person:
    """What the ledger says of one user: ``lessons`` that no learn has considered, the oldest from ``since``; whether a learn
    that its budget ended ``goes_on``; ``learned``: when a learn last said something; ``seconds`` that the last learns took
    on average (None: there was none).
    """

    id: str
    lessons: int
    since: datetime | None = None
    goes_on: bool = False
    learned: datetime | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """How things are: ``now`` in UTC, the ``zone`` of the person's day; what the machine says (None: it does not): on
    ``mains``, the share of its processors that ``others`` use, its ``temperature``; when a person was last ``served``.
    """

    now: datetime
    zone: tzinfo
    mains: bool | None = None
    others: float | None = None
    temperature: float | None = None
    served: datetime | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What was done already: ``spent`` seconds of learning today, and for which moment each chore was last done."""

    spent: float = 0.0
    chores: Mapping[Kind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Learn:
    """Have a user learn, for at most so many ``seconds`` of training."""

    user: str
    seconds: float
    because: str


@dataclass(frozen=True, slots=True)
class Chore:
    """Do a chore, for the moment that ``key`` names."""

    kind: Kind
    key: str
    because: str


@dataclass(frozen=True, slots=True)
class Coming:
    """What comes next; ``at`` is None where no clock tells when."""

    what: str
    at: datetime | None
    because: str


@dataclass(frozen=True, slots=True)
class Decision:
    """``act`` is what to do now; None: nothing. ``coming`` is what comes next, the soonest first."""

    act: Learn | Chore | None
    coming: tuple[Coming, ...] = ()


def decide(settings: Settings, moment: Moment, people: Sequence[Person], past: Past) -> Decision:
    """What to do now. After it was done, ask again with the facts as they are then."""
    due = sorted(
        ((person, why) for person in people if (why := _due(settings, moment, person))),
        key=lambda each: (not each[0].goes_on, -worth(moment, each[0]), each[0].id),
    )
    hindered = _hindered(settings, moment, past)
    if due and hindered is None:
        (person, why), *others = due
        coming = _coming(
            settings, moment, [each for each in people if each != person], others, hindered
        )
        return Decision(
            Learn(person.id, max(_LEAST, settings.budget * 60 - past.spent), why), coming
        )
    chore = _chore(settings, moment, past)
    coming = _coming(settings, moment, people, due, hindered)
    return Decision(None if _is_talking(moment, QUIET) else chore, coming)


def worth(moment: Moment, person: Person) -> float:
    """Lessons for each second that learning them is expected to take, times one more for each day that the oldest has waited:
    so whoever learns slowly has their turn too.
    """
    waited = max(timedelta(), moment.now - person.since) if person.since else timedelta()
    return person.lessons * (1 + waited / timedelta(days=1)) / max(person.seconds or _GUESS, 1.0)


def last_moment(at: time, now: datetime, zone: tzinfo) -> datetime:
    """The last moment, until now, at which it was that time of day."""
    today = now.astimezone(zone).date()
    # Tomorrow too: where clocks are set back over midnight, the later of two moments can have the earlier date.
    moments = [_on(today + timedelta(days=days), at, zone) for days in (1, 0, -1, -2)]
    return max(moment for moment in moments if moment <= now)


def next_moment(at: time, now: datetime, zone: tzinfo) -> datetime:
    """The next moment, after now, at which it is that time of day."""
    today = now.astimezone(zone).date()
    moments = [_on(today + timedelta(days=days), at, zone) for days in (-1, 0, 1, 2)]
    return min(moment for moment in moments if moment > now)


def _on(day: date, at: time, zone: tzinfo) -> datetime:
    # fold=0 is the first of two, and where there is none, that of the clock that was not set forward yet.
    return datetime.combine(day, at, zone).replace(fold=0).astimezone(UTC)


def _due(settings: Settings, moment: Moment, person: Person) -> str:
    """Why somebody should learn, if the moment were right; empty where they should not."""
    if person.goes_on:
        return "a learn that ran out of its time goes on"
    if person.lessons >= settings.signals:
        return f"{pluralize(person.lessons, 'new lesson')}, and {settings.signals} are enough"
    at = time_of_day(settings.at)
    if person.lessons < 1 or at is None:
        return ""
    last = last_moment(at, moment.now, moment.zone)
    # What has a date that is still to come was said before a clock was set back: it was there at that time of day.
    was_there = person.since is None or person.since <= last or person.since > moment.now
    once = person.learned is None or last_moment(at, person.learned, moment.zone) != last
    return (
        f"{pluralize(person.lessons, 'new lesson')}, and it was {settings.at}"
        if was_there and once
        else ""
    )


def _hindered(settings: Settings, moment: Moment, past: Past) -> Coming | None:
    """What keeps everybody from learning now, and until when."""
    if settings.mains and moment.mains is False:
        return Coming("learning", None, "waits for mains power")
    if moment.temperature is not None and moment.temperature >= settings.temperature:
        why = f"waits until it is cooler ({moment.temperature:.0f} °C of {settings.temperature:g})"
        return Coming("learning", None, why)
    idle = max(timedelta(minutes=settings.idle), QUIET)
    if moment.served is not None and _is_talking(moment, idle):
        return Coming(
            "learning",
            moment.served + idle,
            f"waits until nobody has asked anything for {_minutes(idle)}",
        )
    if moment.others is not None and moment.others > settings.load:
        why = f"waits until others use less of the processors ({moment.others:.0%} of {settings.load:.0%})"
        return Coming("learning", None, why)
    if past.spent + _LEAST > settings.budget * 60:
        why = f"the {settings.budget:g} minutes of today are used up"
        return Coming("learning", next_moment(time(0), moment.now, moment.zone), why)
    return None


def _is_talking(moment: Moment, within: timedelta) -> bool:
    # The distance, not the order: after a clock was set back, what was a minute ago has a date that is still to come.
    return moment.served is not None and abs(moment.now - moment.served) < within


def _chore(settings: Settings, moment: Moment, past: Past) -> Chore | None:
    for kind in Kind:
        found = _moment_of(settings, moment, kind)
        if found is None:
            continue
        last, because = found
        if past.chores.get(kind) != (key := last.isoformat()):
            return Chore(kind, key, because)
    return None


def _moment_of(settings: Settings, moment: Moment, kind: Kind) -> tuple[datetime, str] | None:
    """The last moment at which a chore was to be done, and when that is, in words; None: it is switched off."""
    if kind is Kind.PROBATION:
        return moment.now.replace(minute=0, second=0, microsecond=0), "every hour"
    if kind is Kind.BACKUP and not settings.backup:
        return None
    at = time_of_day(settings.morning if kind is Kind.REPORT else settings.at or "03:00")
    if at is None:
        return None
    return last_moment(at, moment.now, moment.zone), f"every day at {at:%H:%M}"


def _coming(
    settings: Settings,
    moment: Moment,
    people: Sequence[Person],
    due: Sequence[tuple[Person, str]],
    hindered: Coming | None,
) -> tuple[Coming, ...]:
    found: list[Coming] = []
    for person, why in due:
        until, because = (
            (None, why) if hindered is None else (hindered.at, f"{why}; {hindered.because}")
        )
        found.append(Coming(f"{person.id} learns", until, because))
    at, waiting = time_of_day(settings.at), {person.id for person, _ in due}
    for person in people:
        if person.lessons and person.id not in waiting:
            missing = f"{pluralize(person.lessons, 'new lesson')} of the {settings.signals} that are enough at any time"
            found.append(
                Coming(
                    f"{person.id} learns",
                    next_moment(at, moment.now, moment.zone) if at else None,
                    missing,
                )
            )
    for kind in Kind:
        when = time_of_day(settings.morning if kind is Kind.REPORT else settings.at or "03:00")
        if (
            kind is not Kind.PROBATION
            and when is not None
            and (kind is not Kind.BACKUP or settings.backup)
        ):
            found.append(
                Coming(
                    kind, next_moment(when, moment.now, moment.zone), f"every day at {when:%H:%M}"
                )
            )
    far = datetime.max.replace(tzinfo=UTC)
    return tuple(sorted(found, key=lambda each: each.at or far))


def _minutes(span: timedelta) -> str:
    minutes = span / timedelta(minutes=1)
    return f"{minutes:g} minutes" if minutes >= 1 else f"{span / timedelta(seconds=1):g} seconds"
