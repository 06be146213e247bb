"""Model names of OpenAI and Anthropic clients: the base, a user, or a user at a revision.

Invariant: the name of a user whom the caller may not act for is an unknown model. So callers do not
learn whether that user exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from personalpeft import Runtime, User
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidId, NotFound
from personalpeft.ids import USER_ID, check_user_id
from personalpeft_app.http.error_responses import InvalidParameter, UnknownModel
from personalpeft_app.http.security import caller

_LONGEST = 256


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
        whose, _, revision = name[:_LONGEST].partition("@")
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
            count = "more than one revision" if found else "no revision"
            raise UnknownModel(f"{user.id} has {count} of that name. GET /v1/models lists them.")
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
        revision = model.options.get("revision")
        if revision is not None:
            at = next(each.at for each in model.user.revisions() if each.id == revision)
        elif model.name == self.base.card.name:
            return 0
        else:
            at = model.user.summary().since
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
        raise UnknownModel(_unknown(name))

    def _names(self, after: str | None, batch: int) -> Iterator[tuple[str, int]]:
        """Yield the names after ``after``, reading ``batch`` users at a time."""
        shared = (self.base.card.name, self._runtime.embedder)
        own = caller().user
        if own is not None:
            # The base hides a user of its name.
            first = shared if own in shared else (own, *shared)
            revisions = _of_revisions(self._runtime.user(own))
            yield from _following([*((name, 0) for name in first), *revisions], after)
            return
        user = None
        if after is None or after in shared:
            yield from _following([(name, 0) for name in shared], after)
        else:
            user = after.partition("@")[0]
            yield from _following(self._names_of(user), after)
        for name, since in self._users_after(user, batch):
            # The base hides a user of its name.
            if name not in shared:
                yield name, since

    def _names_of(self, user: str) -> list[tuple[str, int]]:
        """Return the names of a user who may be unknown; none for an invalid id."""
        try:
            return [(user, 0), *_of_revisions(self._runtime.user(user, create=False))]
        except InvalidId:
            return []
        except NotFound:
            return [(user, 0)]

    def _users_after(self, after: str | None, batch: int) -> Iterator[tuple[str, int]]:
        """Yield the users after ``after`` by id, each before their revisions."""
        # The first request creates the owner; until then only the name exists.
        owner = self._owner if after is None or (self._owner or "") > after else None
        while users := self._runtime.users(after=after, limit=batch):
            for each in users:
                if owner is not None and each.id > owner:
                    yield owner, 0
                owner = None if owner is not None and each.id >= owner else owner
                with suppress(NotFound):  # The user was forgotten after the page was read.
                    revisions = [*_of_revisions(self._runtime.user(each.id, create=False))]
                    yield each.id, int(each.since.timestamp())
                    yield from revisions
            after = users[-1].id
        if owner is not None:
            yield owner, 0


def _of_revisions(user: User) -> Iterator[tuple[str, int]]:
    return ((f"{user.id}@{each.id}", int(each.at.timestamp())) for each in user.revisions())


def _following(names: list[tuple[str, int]], after: str | None) -> list[tuple[str, int]]:
    """Return the names after ``after``, or all without it. Raises ``InvalidParameter``."""
    if after is None:
        return names
    known = [name for name, _ in names]
    if after not in known:
        raise InvalidParameter(
            "after must be the name of a model. Start with the first page.", "after"
        )
    return names[known.index(after) + 1 :]


def _unknown(name: str) -> str:
    if USER_ID.fullmatch(name):
        hint = f"If {name} is to be a new user, first run: personalpeft api-key make --user {name}"
        return f"The model {name} is unknown. GET /v1/models lists the models. {hint}"
    near = f" Did you mean {name.lower()}?" if USER_ID.fullmatch(name.lower()) else ""
    return f"The model of this name is unknown.{near} GET /v1/models lists the models."
