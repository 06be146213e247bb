"""Read from a home what each user has to learn. Loads no model."""

from __future__ import annotations

from personalpeft import NotFound, Runtime
from personalpeft.learning.status import Pending
from personalpeft.store.types import UserSummary

# A rollback, among others, alters no number of a user's summary. It is seen after this many reads.
_FULL_READ_EVERY = 30


class BacklogCache:
    """The pending learns of all users. Reads a user anew only after their summary changed."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[UserSummary, Pending]] = {}
        self._reads = 0

    def read(self, runtime: Runtime) -> dict[str, Pending]:
        """Return, by user, what is pending of those with something to learn."""
        now: dict[str, tuple[UserSummary, Pending]] = {}
        self._reads += 1
        if self._reads % _FULL_READ_EVERY == 0:
            self._pending = {}
        for summary in runtime.iter_users():
            if not summary.signals:
                continue
            before = self._pending.get(summary.id)
            if before is not None and before[0] == summary:
                now[summary.id] = before
                continue
            try:
                now[summary.id] = summary, runtime.user(summary.id, create=False).pending()
            except NotFound:  # The user was deleted after the page was read.
                continue
        self._pending = now
        return {user: pending for user, (_, pending) in now.items() if pending.triggers}

    def forget(self, user: str) -> None:
        """Read this user anew the next time."""
        self._pending.pop(user, None)
