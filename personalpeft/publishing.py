"""What is live, put where servers elsewhere find it by name, whoever is served here now.

Invariants: what is published on a base holds one stack for each user who was ever published to that place and had one then: what was
live when they were published last. Publishing what is there writes nothing. What a user has published is written down in the home
before it lies anywhere, so that a forgetting knows of it whatever was killed meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from personalpeft import stacks
from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.published import (
    PublishedAdapter,
    PublishedSubfolder,
    build_published_adapter,
)
from personalpeft.adapters.types import Adapter
from personalpeft.errors import (
    AdapterError,
    BaseMismatch,
    Busy,
    Damaged,
    InvalidInput,
    PersonalPeftError,
)
from personalpeft.ids import check_user_id
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.store.types import UserSummary
from personalpeft.types import Progress

_STAGE = "Publishing"
# Seconds: who has a turn needs it for one user's files alone.
_PATIENCE, _LOOK = 30.0, 0.02


@dataclass(frozen=True, slots=True)
class PublishedStack:
    """What is published of a user: the name that servers elsewhere find their stack by, or None and why there is none."""

    user: str
    name: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What lies in ``folder`` now of those who were asked for: a folder for each stack, called by its digest. ``written`` of them
    were not there before, and ``taken`` others were taken away.
    """

    folder: Path
    stacks: tuple[PublishedStack, ...]
    written: int
    taken: int


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """Of one user in one part: the digest of what is published, and of what may lie there besides."""

    now: str | None
    old: frozenset[str] = frozenset()

    def holding(self, digest: str | None) -> PublicationRecord:
        return PublicationRecord(digest, (self.old | {self.now or ""}) - {digest or "", ""})


def publish(
    services: Services,
    read: Callable[[str], Adapter],
    place: Path,
    users: Sequence[str] | None,
    progress: Progress,
) -> PublishReport:
    """As ``Runtime.publish``, below a place; ``read`` brings an adapter by the digest of its packed file."""
    store = services.store
    asked = _users_with_layers(store) if users is None else _checked(store, users)
    base = services.base.digest
    said: list[PublishedStack] = []
    written = 0
    with store.maintenance.exclusive("publish"), _folder_errors(place):
        # A worker has one base, and can do nothing with what was built on another.
        part = PublishedSubfolder.below(place, f"{_key(services)}_{base[:12]}")
        part.sweep()
        for number, user in enumerate(asked):
            progress(_STAGE, number / len(asked))
            with _publish_lock(store, user):
                folder, reason = _made(services, read, user)
                _write_record(
                    store,
                    user,
                    part,
                    _read_record(store, user, part).holding(folder.digest if folder else None),
                )
                written += folder is not None and part.put(folder)
            if folder or users is not None:
                said.append(PublishedStack(user, folder.name if folder else None, reason))
        taken = _remove_old_stack(store, part, asked)
    progress(_STAGE, 1.0)
    return PublishReport(part.path, tuple(said), written, taken)


@contextmanager
def unpublishing(services: Services, user: str) -> Iterator[Callable[[], None]]:
    """Inside, nothing of a user is published by anybody; what is given takes away all that was, wherever that can be reached. What
    cannot stays written down, and goes with the next publishing there.
    """
    with _publish_lock(services.store, user):
        yield partial(_withdraw, services.store, user)


def _withdraw(store: Store, user: str) -> None:
    for path, noted in _read_records(store, user).items():
        part = PublishedSubfolder(Path(path))
        _write_record(store, user, part, noted.holding(None))
        with suppress(OSError):
            _remove_stack(store, user, part, _held(store, part))
            # Of a publishing that was killed; one that runs needs it.
            with suppress(Busy), store.maintenance.exclusive("publish"):
                part.sweep()


def _made(
    services: Services, read: Callable[[str], Adapter], user: str
) -> tuple[PublishedAdapter | None, str]:
    """What is live of a user as a folder; None, and why, where there is nothing that others could serve."""
    try:
        stack = stacks.enabled_stack(services, user)
        if stack.is_bare:
            return None, "nothing is live"
        layers = [
            (read(entry.digest), entry.weight) for entry in stack.entries if entry.weight != 0
        ]
        return build_published_adapter(compose(layers), services.base), ""
    except (AdapterError, BaseMismatch, Damaged) as error:
        return None, error.message


def _remove_old_stack(store: Store, part: PublishedSubfolder, users: Sequence[str]) -> int:
    """Takes away what these users have no more; how many folders that were."""
    having = [user for user in users if _read_record(store, user, part).old]
    held = _held(store, part) if having else frozenset()
    taken = 0
    for user in having:
        with _publish_lock(store, user):
            taken += _remove_stack(store, user, part, held)
    return taken


def _remove_stack(store: Store, user: str, part: PublishedSubfolder, held: frozenset[str]) -> int:
    """Takes away what is noted as a user's of old, but for what is held; how many folders that were. Raises ``OSError``."""
    noted = _read_record(store, user, part)
    for digest in (gone := sorted(noted.old - held)):
        part.remove(digest)
    _write_record(store, user, part, PublicationRecord(noted.now))
    return len(gone)


def _held(store: Store, part: PublishedSubfolder) -> frozenset[str]:
    """What is somebody's now. Two may have the same, where one was taken in from the other's file."""
    return frozenset(
        now for user in _all_users(store) if (now := _read_record(store, user.id, part).now)
    )


def _key(services: Services) -> str:
    """What this home's parts are called by, drawn once."""
    upkeep = services.store.maintenance
    key = upkeep.read_note("published")
    if key is None:
        key = services.clock.entropy(8).hex()
        upkeep.write_note("published", key)
    return key


def _read_record(store: Store, user: str, part: PublishedSubfolder) -> PublicationRecord:
    return _read_records(store, user).get(str(part.path), PublicationRecord(None))


def _read_records(store: Store, user: str) -> dict[str, PublicationRecord]:
    """What a user has published, by the path of the part; nothing where the note cannot be read."""
    try:
        said = json.loads(store.maintenance.read_note(f"published-{user}") or "{}")
        return {
            path: PublicationRecord(each["now"], frozenset(each["old"]))
            for path, each in said.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_record(
    store: Store, user: str, part: PublishedSubfolder, noted: PublicationRecord
) -> None:
    known = _read_records(store, user)
    if noted == known.get(str(part.path), PublicationRecord(None)):
        return
    known[str(part.path)] = noted
    said = {
        path: {"now": each.now, "old": sorted(each.old)}
        for path, each in known.items()
        if each != PublicationRecord(None)
    }
    store.maintenance.write_note(f"published-{user}", json.dumps(said))


def _all_users(store: Store) -> Iterator[UserSummary]:
    last = None
    while page := store.catalog.users(after=last, limit=1000):
        yield from page
        last = page[-1].id


def _users_with_layers(store: Store) -> tuple[str, ...]:
    """Who may have something live, or published: of the others, who may be many, nothing is to be done."""
    return tuple(
        user.id for user in _all_users(store) if user.revisions or _read_records(store, user.id)
    )


def _checked(store: Store, users: Sequence[str]) -> tuple[str, ...]:
    if isinstance(users, str):
        raise InvalidInput(
            f"{users!a} is no list of users.", hint="Give a list of ids, or None for everybody."
        )
    asked = tuple(dict.fromkeys(users))
    for user in asked:
        check_user_id(user)
        store.catalog.user(user)
    return asked


@contextmanager
def _publish_lock(store: Store, user: str) -> Iterator[None]:
    """One at a time, of all processes, has to do with what a user has published. Raises ``Busy``."""
    ends = time.monotonic() + _PATIENCE
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(store.leases.acquire(f"publish-{user}"))
                break
            except Busy:
                if time.monotonic() > ends:
                    raise
                time.sleep(_LOOK)
        yield


@contextmanager
def _folder_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except PersonalPeftError:
        raise
    except OSError as error:
        raise InvalidInput(
            f"{place} cannot hold published stacks: {error.strerror or error}.",
            hint="Make room there, or name another folder; what was published before is still there.",
        ) from error
