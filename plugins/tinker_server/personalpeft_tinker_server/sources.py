"""The users whom rows belong to, and whose layers weights were trained from, for forgetting.

Invariant: the sources of a run or checkpoint are stored before its weights are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass

from personalpeft import Runtime
from personalpeft.errors import NotFound
from personalpeft_tinker_server.database import USER_OWNER, Database


@dataclass(frozen=True, slots=True)
class Source:
    """A revision of a user's layer. ``since`` is when the user was created."""

    user: str
    since: str
    revision: str


class Sources:
    """The sources of all runs, by their id, and of all checkpoints, by their path."""

    def __init__(self, runtime: Runtime, database: Database) -> None:
        self._runtime, self._db = runtime, database
        self._owners_lock = threading.Lock()

    def of_layer(self, user_id: str, layer: str) -> set[Source]:
        """Return the live revision of a layer. Raises ``NotFound`` for an unknown user."""
        user = self._runtime.user(user_id, create=False)
        since = str(user.summary().since)
        heads = (each.head for each in user.layers() if each.name == layer)
        return {Source(user.id, since, head) for head in heads if head is not None}

    def of(self, holder: str) -> set[Source]:
        """Return the sources of a run or checkpoint."""
        rows = self._db.rows("select user, since, revision from sources where holder = ?", holder)
        return {Source(*row) for row in rows}

    def add(self, holder: str, sources: Iterable[Source]) -> None:
        """Add sources to those of a run or checkpoint."""
        for source in sources:
            self._db.execute(
                "insert or ignore into sources values (?, ?, ?, ?)", holder, *astuple(source)
            )

    def replace(self, holder: str, sources: Iterable[Source]) -> None:
        """Set the sources of a run or checkpoint."""
        self._db.execute("delete from sources where holder = ?", holder)
        self.add(holder, sources)

    def is_forgotten(self, source: Source) -> bool:
        """Return whether a source was erased."""
        with suppress(NotFound):
            user = self._runtime.user(source.user, create=False)
            if str(user.summary().since) == source.since:
                layer = source.revision.rpartition("@")[0]
                return all(each.id != source.revision for each in user.revisions(layer))
        return True

    def erase_former(self, owner: str) -> None:
        """Erase what an owner has, unless its user is the one whom it was noted for."""
        with self._owners_lock:
            since = None
            with suppress(NotFound):
                user = self._runtime.user(owner.removeprefix(USER_OWNER), create=False)
                since = str(user.summary().since)
            noted = self._db.row("select since from owners where owner = ?", owner)
            if noted is not None and noted["since"] != since:
                self._db.erase_owner(owner)
                noted = None
            if noted is None and since is not None:
                self._db.execute("insert into owners values (?, ?)", owner, since)

    def erase_forgotten(self) -> None:
        """Erase what forgotten users own, and what was trained from erased sources."""
        for (owner,) in self._db.rows("select owner from owners"):
            self.erase_former(owner)
        rows = self._db.rows("select distinct user, since, revision from sources")
        for source in (Source(*row) for row in rows):
            if self.is_forgotten(source):
                self._db.erase_source(*astuple(source))
