"""What a foreign client calls a model: the bare base, a user, or a user at a revision.

Invariant: a name leads to a user only where the caller may act for that user; else it is a model that is not there, the same
whether such a user exists or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from personalpeft import Runtime, User
from personalpeft.bases.template import takes_tools
from personalpeft.errors import InvalidId, NotFound
from personalpeft.ids import USER_ID, check_user_id
from personalpeft_app.http.failures import UnknownModel
from personalpeft_app.http.security import caller

_PAGE = 1000
_LONGEST = 256


@dataclass(frozen=True, slots=True)
class Model:
    """Who answers, and with what of theirs: ``asked`` goes to ``User.stream``."""

    name: str
    user: User
    asked: Mapping[str, Any]


class Models:
    """The models of a runtime. ``owner`` is whose the bare base's turns are where administration asks it."""

    def __init__(self, runtime: Runtime, owner: str | None) -> None:
        self._runtime = runtime
        self._owner = owner

    def named(self, name: str) -> Model:
        """Raises ``UnknownModel``; ``NotFound`` with the nearest where only the revision is unknown."""
        whose, _, revision = name[:_LONGEST].partition("@")
        base = self._runtime.base().card.name
        if name == base:
            if self._own is None:
                raise UnknownModel(f"The bare base {base} needs a user to ask it for. Start the server with one.")
            return Model(name, self._runtime.user(self._own), {"layers": [], "memory": False})
        user = self._user(whose)
        if not revision:
            return Model(name, user, {})
        try:
            known = next(each.id for each in user.revisions() if each.id.startswith(revision))
        except StopIteration:
            raise UnknownModel(f"{user.id} has no revision of that name. GET /v1/models lists them.") from None
        return Model(name, user, {"revision": known})

    def names(self) -> Iterator[tuple[str, int]]:
        """Every name that this caller can ask, with the Unix time since when it is there: the base, the model that makes
        vectors, users, revisions.
        """
        yield self._runtime.base().card.name, 0
        yield self._runtime.embedder, 0
        known = False
        for user, since in self._users():
            known = known or user.id == self._own
            yield user.id, since
            for revision in user.revisions():
                yield f"{user.id}@{revision.id}", int(revision.at.timestamp())
        if self._own is not None and not known:
            # Made by the first question; until then there is only the name to ask by.
            yield self._own, 0

    @property
    def take_tools(self) -> bool:
        """Whether the base's chat template tells its model of tools."""
        return takes_tools(self._runtime.base())

    @property
    def usual_stops(self) -> tuple[str, ...]:
        """The stop strings of a reply where a request names none."""
        return self._runtime.base().card.sampling.stop

    @property
    def _own(self) -> str | None:
        """Whose model the caller's own is."""
        return caller().user or self._owner

    def _user(self, name: str) -> User:
        try:
            check_user_id(name)
            if not caller().may_act_for(name):
                raise UnknownModel(_nothing(name))
            # Whoever holds a token of a user, or runs the server as one, need not be made first; a slip of the pen makes nobody.
            return self._runtime.user(name, create=name == self._own)
        except (InvalidId, NotFound):
            raise UnknownModel(_nothing(name)) from None

    def _users(self) -> Iterator[tuple[User, int]]:
        own = caller().user
        if own is not None:
            yield self._runtime.user(own), 0
            return
        after = None
        while page := self._runtime.users(after=after, limit=_PAGE):
            for each in page:
                yield self._runtime.user(each.id, create=False), int(each.since.timestamp())
            after = page[-1].id


def _nothing(name: str) -> str:
    shown = name if USER_ID.fullmatch(name) else "of that name"
    return f"There is no model {shown} here. GET /v1/models lists those that there are."
