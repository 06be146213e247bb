"""Model names of OpenAI and Anthropic clients: the base, a user, or a user at a revision.

Invariant: the name of a user whom the caller may not act for is an unknown model. So callers do not
learn whether that user exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from personalpeft import Runtime, User
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidId, NotFound
from personalpeft.ids import USER_ID, check_user_id
from personalpeft_app.http.error_responses import InvalidParameter, UnknownModel
from personalpeft_app.http.security import caller


@dataclass(frozen=True, slots=True)
class Model:
    """The user who answers, and options for ``User.stream``."""

    name: str
    user: User
    options: Mapping[str, Any]


class Models:
    """The models of a runtime. ``owner`` records an admin's turns with the bare base."""

    def __init__(self, runtime: Runtime, owner: str | None) -> None:
        self._runtime = runtime
        self._owner = owner

    def resolve(self, name: str) -> Model:
        """Return the model of a name. Raises ``UnknownModel``."""
        whose, _, revision = name.partition("@")
        base = self.base.card.name
        if name == base:
            if self._default_user is None:
                raise UnknownModel(
                    f"The bare base {base} needs a user to ask it for. Start the server with one."
                )
            return Model(
                name, self._runtime.user(self._default_user), {"layers": [], "memory": False}
            )
        if name == self._runtime.embedder:
            raise UnknownModel(f"{name} is for /v1/embeddings. GET /v1/models lists the models.")
        user = self._user(whose)
        if "@" not in name:
            return Model(name, user, {})
        known = [each.id for each in user.revisions() if revision and each.id.startswith(revision)]
        found = [revision] if revision in known else known
        if len(found) != 1:
            raise UnknownModel(
                f"{user.id} has {len(found)} revisions of that name. GET /v1/models lists them."
            )
        return Model(name, user, {"revision": found[0]})

    def page(self, after: str | None, limit: int) -> tuple[list[tuple[str, int]], bool]:
        """Return up to ``limit`` names with creation times, and whether there are more.

        The order is the base, the embedding model, then users by id, each before its revisions. At
        most ``limit`` + 1 users are read. For the API key of one user, that user is the first:
        front ends preselect it. Raises ``InvalidParameter`` for an unknown ``after``.
        """
        found = list(islice(self._names(after, limit + 1), limit + 1))
        return found[:limit], len(found) > limit

    def created_at(self, model: Model) -> int:
        """Return the Unix time at which a model was created, 0 for the base."""
        if model.name == self.base.card.name:
            return 0
        at = model.user.summary().since
        if revision := model.options.get("revision"):
            at = next(each.at for each in model.user.revisions() if each.id == revision)
        return int(at.timestamp())

    @property
    def base(self) -> Base:
        return self._runtime.base()

    @property
    def _default_user(self) -> str | None:
        """The user of a request that names none."""
        return caller().user or self._owner

    def _user(self, name: str) -> User:
        try:
            check_user_id(name)
            if caller().may_act_for(name):
                # Only the caller's own user is created on first use: a typo creates none.
                return self._runtime.user(name, create=name == self._default_user)
        except (InvalidId, NotFound):
            pass
        named = f"The model {name}" if USER_ID.fullmatch(name) else "The model of this name"
        raise UnknownModel(
            f"{named} is unknown. GET /v1/models lists the models. If it is to be a new user, first"
            " run: personalpeft api-key make --user NAME"
        )

    def _names(self, after: str | None, batch: int) -> Iterator[tuple[str, int]]:
        """Yield the names after ``after``, reading ``batch`` users at a time."""
        shared = {self.base.card.name: 0, self._runtime.embedder: 0}
        own = caller().user
        if own is not None:
            names = [*({own: 0} | shared).items(), *_of_revisions(self._runtime.user(own))]
            yield from _following(names, after)
            return
        user = None
        if after is None or after in shared:
            yield from _following([*shared.items()], after)
        else:
            user = after.partition("@")[0]
            yield from _following(self._names_of(user, 0), after)
        for id_, since in self._users_after(user, batch):
            # The base hides a user of its name.
            yield from (each for each in self._names_of(id_, since) if each[0] not in shared)

    def _names_of(self, user: str, since: int) -> list[tuple[str, int]]:
        """Return the names of a user who may be unknown; none for an invalid id."""
        try:
            return [(user, since), *_of_revisions(self._runtime.user(user, create=False))]
        except InvalidId:
            return []
        except NotFound:
            return [(user, since)]

    def _users_after(self, after: str | None, batch: int) -> Iterator[tuple[str, int]]:
        """Yield the users after ``after`` by id, and when they were created."""
        # The first request creates the owner; until then only the name exists.
        owner = [(self._owner, 0)] if self._owner and (after or "") < self._owner else []
        everyone = heapq.merge(self._stored_after(after, batch), owner, key=itemgetter(0))
        for _, same in groupby(everyone, key=itemgetter(0)):
            yield next(same)

    def _stored_after(self, after: str | None, batch: int) -> Iterator[tuple[str, int]]:
        while users := self._runtime.users(after=after, limit=batch):
            yield from ((each.id, int(each.since.timestamp())) for each in users)
            after = users[-1].id


def _of_revisions(user: User) -> Iterator[tuple[str, int]]:
    return ((f"{user.id}@{each.id}", int(each.at.timestamp())) for each in user.revisions())


def _following(names: list[tuple[str, int]], after: str | None) -> list[tuple[str, int]]:
    """Return the names after ``after``, or all without it. Raises ``InvalidParameter``."""
    if after is None:
        return names
    known = [name for name, _ in names]
    if after not in known:
        raise InvalidParameter("after", "must be the name of a model of the page before")
    return names[known.index(after) + 1 :]
