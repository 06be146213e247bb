"""Asks a home for what ``deciding`` goes by. Loads no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from personalpeft import NotFound, Runtime
from personalpeft.learning.triggers import Pending, TrainingTrigger
from personalpeft.store.types import UserSummary
from personalpeft_app.daemon.policy import Backlog

_PAGE = 500
# What changes no number of a user's summary (a rollback, a lesson taken back) is seen after so many looks.
_ANEW = 30


class BacklogCache:
    """What is pending of everybody in a home. Who said and learned nothing since the last look is not asked again."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[UserSummary, Pending]] = {}
        self._looks = 0

    def read(self, runtime: Runtime) -> dict[str, Pending]:
        """By user: those who have something to learn."""
        now: dict[str, tuple[UserSummary, Pending]] = {}
        self._looks += 1
        if self._looks % _ANEW == 0:
            self._pending = {}
        for summary in list_users(runtime):
            if not summary.signals:
                continue
            before = self._pending.get(summary.id)
            if before is not None and before[0] == summary:
                now[summary.id] = before
                continue
            try:
                now[summary.id] = summary, runtime.user(summary.id, create=False).pending()
            except NotFound:  # Gone since the page was read.
                continue
        self._pending = now
        return {user: pending for user, (_, pending) in now.items() if pending.news}

    def forget(self, user: str) -> None:
        """Asks for this user anew the next time."""
        self._pending.pop(user, None)


def backlog_of(
    pending: Pending, tried: tuple[str, ...]
) -> tuple[Backlog, tuple[TrainingTrigger, ...]]:
    """One user, and the reasons that count: not those that were tried in vain."""
    news = tuple(each for each in pending.news if each.key not in tried)
    lessons = [each for each in news if each.kind != "begun"]
    dated = [each.at for each in lessons if each.at is not None]
    person = Backlog(
        pending.user,
        len(lessons),
        min(dated, default=None),
        any(each.kind == "begun" for each in news),
        pending.learned,
        pending.seconds,
    )
    return person, news


def backlogs(
    found: Mapping[str, Pending], tried: Mapping[str, tuple[str, ...]]
) -> tuple[Backlog, ...]:
    """Everybody who has a reason to learn that counts."""
    everybody = (backlog_of(pending, tried.get(user, ()))[0] for user, pending in found.items())
    return tuple(person for person in everybody if person.lessons or person.unfinished)


def list_users(runtime: Runtime) -> Iterator[UserSummary]:
    """All users of a home, by id."""
    after = None
    while page := runtime.users(after=after, limit=_PAGE):
        yield from page
        after = page[-1].id
        if len(page) < _PAGE:
            return
