"""What the daemon remembers beside the ledger: what it did, what it was just doing, and what it tried in vain.

Invariants: its size is bounded whatever happens; without it nothing is learned twice that a report has considered, since that
is in the ledger; what cannot be read is as if it were not there. No words of a person are in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from personalpeft_app.daemon.daily_report import ReportWindow
from personalpeft_app.daemon.policy import TaskKind

TASK = "daemon"
"""The name of its lease and of its note."""

MOST_KILLS = 5
"""A learn that so often was cut off with the process is not tried again until something new has come."""

_FORMAT = 2
_LINES = 200
_DAYS = 8
_BEGUN = 20
# Of one user, and of all: whoever tried in vain longest ago is tried again.
_KEYS = 2_000
_ALL_KEYS = 20_000
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One thing that was done: when, what, to whom (empty: the home), what came of it, and the seconds that it took."""

    at: str
    kind: str
    user: str
    message: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StartedWork:
    """A learn that runs, or was cut off: the ``keys`` of its reasons, and how often it was begun for them."""

    keys: tuple[str, ...]
    times: int


@dataclass(frozen=True, slots=True)
class Journal:
    """``begun`` are, by user, learns of which no end was written down; ``tried`` the reasons that
    led to nothing the ledger tells; ``spent`` are the seconds of learning by local day;
    ``chores`` the moment for which each was last done; ``morning`` what the last report was about that had something to say.
    """

    started: Mapping[str, StartedWork] = field(default_factory=dict)
    attempts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[TaskKind, str] = field(default_factory=dict)
    entries: tuple[LogEntry, ...] = ()
    last_report: ReportWindow | None = None

    def log(
        self, at: datetime, what: str, said: str, *, user: str = "", seconds: float = 0.0
    ) -> Self:
        """With one line more."""
        line = LogEntry(
            at.isoformat(timespec="seconds"), what, user, said[:_LONGEST], round(seconds, 1)
        )
        return replace(self, entries=(*self.entries, line)[-_LINES:])

    def start(self, user: str, keys: tuple[str, ...]) -> Self:
        """With a learn begun; counted on where the same one was cut off."""
        before = self.started.get(user)
        times = before.times + 1 if before is not None and before.keys == keys[:_KEYS] else 1
        begun = {**self.started, user: StartedWork(keys[:_KEYS], times)}
        return replace(self, started=dict(list(begun.items())[-_BEGUN:]))

    def finish(self, user: str) -> Self:
        """With that user's learn at its end, whatever came of it."""
        return replace(
            self, started={name: each for name, each in self.started.items() if name != user}
        )

    def futile(self, user: str, keys: tuple[str, ...]) -> Self:
        """With reasons that are not to lead to another learn, in place of that user's former ones."""
        tried = {name: known for name, known in self.attempts.items() if name != user}
        if keys:
            tried[user] = keys[-_KEYS:]
        while sum(map(len, tried.values())) > _ALL_KEYS:
            del tried[next(iter(tried))]
        return replace(self, attempts=tried)

    def add_time(self, day: str, seconds: float) -> Self:
        """With seconds of learning on a day."""
        spent = {**self.spent, day: self.spent.get(day, 0.0) + max(0.0, seconds)}
        # By when they were first used, not by date, which a clock can set wrong.
        return replace(self, spent={name: spent[name] for name in list(spent)[-_DAYS:]})

    def record_task(self, kind: TaskKind, key: str) -> Self:
        """With a chore done for a moment."""
        return replace(self, tasks={**self.tasks, kind: key})

    def record_report(self, period: ReportWindow) -> Self:
        """With a report that had something to say."""
        return replace(self, last_report=period)

    def as_text(self) -> str:
        """What ``from_text`` reads."""
        return json.dumps(
            {"format": _FORMAT, **asdict(self)}, ensure_ascii=False, default=datetime.isoformat
        )


def from_text(text: str | None) -> Journal:
    """The journal of a note; an empty one where there is none, or one that cannot be read."""
    try:
        data: dict[str, Any] = json.loads(text or "null")
        if data["format"] == 1:
            data = _upgrade(data)
        if data["format"] != _FORMAT:
            return Journal()
        return Journal(
            {
                str(user): StartedWork(tuple(map(str, begun["keys"])), int(begun["times"]))
                for user, begun in data["started"].items()
            },
            {str(user): tuple(map(str, keys)) for user, keys in data["attempts"].items()},
            {str(day): float(seconds) for day, seconds in data["spent"].items()},
            {TaskKind(kind): str(key) for kind, key in data["tasks"].items()},
            tuple(LogEntry(**line) for line in data["entries"]),
            _period(data.get("last_report")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Journal()


def _upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a journal of format 1 in today's format."""
    names = {
        "begun": "started",
        "tried": "attempts",
        "chores": "tasks",
        "lines": "entries",
        "morning": "last_report",
    }
    entries = [
        {{"what": "kind", "said": "message"}.get(name, name): value for name, value in line.items()}
        for line in data["lines"]
    ]
    renamed = {names.get(name, name): value for name, value in data.items()}
    return {**renamed, "entries": entries, "format": _FORMAT}


def _period(data: Mapping[str, str] | None) -> ReportWindow | None:
    if data is None:
        return None
    return ReportWindow(
        *(datetime.fromisoformat(data[name]).astimezone(UTC) for name in ("since", "until"))
    )
