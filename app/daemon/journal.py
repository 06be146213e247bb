"""The daemon's journal: what it did, what runs, and which reasons led to nothing.

Invariants: its size is bounded. The ledger keeps a learn from running twice for one reason. So a
lost or invalid journal counts as an empty one. It holds no text of a user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from enum import StrEnum
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

MAX_INTERRUPTIONS = 5
"""A learn that was cut off this often with its process waits for a new reason."""

_MAX_ENTRIES = 200
_MAX_DAYS = 8
_MAX_STARTED = 20
# Per user and in all. The reasons of the users who tried longest ago go first.
_MAX_KEYS = 2_000
_MAX_ALL_KEYS = 20_000
MAX_MESSAGE = 300  # Characters of an entry.


class TaskKind(StrEnum):
    """Work other than learning, in order of precedence."""

    PROBATION = "probation"
    BACKUP = "backup"
    COLLECT = "collect"
    REPORT = "report"


class Outcome(StrEnum):
    """How an action ended."""

    DONE = "done"
    NOTHING = "nothing"
    STOPPED = "stopped"
    BUSY = "busy"
    ABANDONED = "abandoned"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One action: when, what, of which user (empty: the home), its result, and its seconds.

    ``resumed`` marks a learn that was cut off with its process and went on.
    """

    at: str
    kind: str
    user: str
    message: str
    seconds: float = 0.0
    outcome: Outcome = Outcome.DONE
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class StartedWork:
    """A learn that runs or was cut off: the keys of its reasons, and how often it started."""

    keys: tuple[str, ...]
    times: int


@dataclass(frozen=True, slots=True)
class FailedTask:
    """The last try of a task: the moment for which it was due, the time of the try, the error."""

    key: str
    at: datetime
    message: str


@dataclass(frozen=True, slots=True)
class ReportWindow:
    """The time after ``since``, up to ``until``."""

    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True)
class Journal:
    """The daemon's journal. Its methods return a changed one.

    Attributes:
        started: By user, learns without a recorded end.
        attempts: By user, reasons that led to nothing which the ledger records.
        spent: Seconds of learning by local day.
        tasks: The moment for which each task was last done. Names of other versions may occur.
        failed: By name, tasks whose last try failed.
        entries: The newest actions, the last one last.
        last_report: The window of the last report with content.
    """

    started: Mapping[str, StartedWork] = field(default_factory=dict)
    attempts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, FailedTask] = field(default_factory=dict)
    entries: tuple[LogEntry, ...] = ()
    last_report: ReportWindow | None = None

    def log(
        self,
        at: datetime,
        kind: str,
        message: str,
        *,
        user: str = "",
        seconds: float = 0.0,
        **result: Any,
    ) -> Self:
        """Add an entry. ``result`` has further fields of ``LogEntry``."""
        time, text = at.isoformat(timespec="seconds"), message[:MAX_MESSAGE]
        entry = LogEntry(time, kind, user, text, round(seconds, 1), **result)
        return replace(self, entries=(*self.entries, entry)[-_MAX_ENTRIES:])

    def start(self, user: str, keys: tuple[str, ...]) -> Self:
        """Record the start of a learn; counted up if the same one was cut off."""
        keys = keys[:_MAX_KEYS]
        before = self.started.get(user)
        times = before.times + 1 if before is not None and before.keys == keys else 1
        started = {**self.started, user: StartedWork(keys, times)}
        return replace(self, started=dict(list(started.items())[-_MAX_STARTED:]))

    def finish(self, user: str) -> Self:
        return replace(self, started=_without(self.started, user))

    def futile(self, user: str, keys: tuple[str, ...]) -> Self:
        """Set the user's reasons that lead to no further learn."""
        attempts = _without(self.attempts, user)
        if keys:
            attempts[user] = keys[-_MAX_KEYS:]
        while sum(map(len, attempts.values())) > _MAX_ALL_KEYS:
            del attempts[next(iter(attempts))]
        return replace(self, attempts=attempts)

    def spent_on(self, now: datetime, zone: tzinfo) -> float:
        """Return the seconds of learning of the day that it is in a zone."""
        return self.spent.get(local_day(now, zone), 0.0)

    def add_time(self, day: str, seconds: float) -> Self:
        spent = {**self.spent, day: self.spent.get(day, 0.0) + max(0.0, seconds)}
        # In order of first use, not by date: a clock can be wrong.
        return replace(self, spent={name: spent[name] for name in list(spent)[-_MAX_DAYS:]})

    def record_task(self, kind: TaskKind, key: str) -> Self:
        tasks, failed = {**self.tasks, kind: key}, _without(self.failed, kind)
        return replace(self, tasks=tasks, failed=failed)

    def as_text(self) -> str:
        """Return the text that ``from_text`` reads."""
        return _ADAPTER.dump_json(self).decode()


_ADAPTER = TypeAdapter(Journal)


def _without(mapping: Mapping[str, T], name: str) -> dict[str, T]:
    return {each: value for each, value in mapping.items() if each != name}


def local_day(now: datetime, zone: tzinfo) -> str:
    """Return the key of a day in ``Journal.spent``."""
    return f"{now.astimezone(zone):%Y-%m-%d}"


def from_text(text: str | None) -> Journal:
    """Return the journal of a note, an empty one for a missing or invalid note."""
    try:
        return _ADAPTER.validate_json(text or "{}")
    except ValidationError:
        return Journal()
