"""Publish live stacks to a folder or bucket, where other servers find them by name.

Invariants: for each user who was ever published to a place, it holds the stack that was live at
their last publication, if there was one. Publishing an unchanged stack writes nothing. A record in
the home is written before any file, so that an erasure finds all files even after a kill.
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
# Seconds to wait for a user's lock, which is held while one user's files are written.
_LOCK_SECONDS, _POLL_SECONDS = 30.0, 0.02


@dataclass(frozen=True, slots=True)
class PublishedStack:
    """The name under which servers find a user's stack, or None and the reason."""

    user: str
    name: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of a publication.

    Attributes:
        folder: It holds a folder for each stack, named by its digest.
        stacks: The stack of each user.
        written: How many stacks are new in the folder.
        taken: How many stacks were removed from it.
    """

    folder: Path
    stacks: tuple[PublishedStack, ...]
    written: int
    taken: int


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """A user's publications in one folder, as digests: the current one, and obsolete files."""

    current: str | None
    obsolete: frozenset[str] = frozenset()

    def updated(self, digest: str | None) -> PublicationRecord:
        """Return the record with another current digest."""
        obsolete = (self.obsolete | {self.current or ""}) - {digest or "", ""}
        return PublicationRecord(digest, obsolete)


_NO_RECORD = PublicationRecord(None)


def publish(
    services: Services,
    read_adapter: Callable[[str], Adapter],
    place: Path,
    users: Sequence[str] | None,
    progress: Progress,
) -> PublishReport:
    """See ``Runtime.publish``. ``read_adapter`` reads an adapter by its packed file's digest."""
    store = services.store
    user_ids = _users_with_layers(store) if users is None else _check_users(store, users)
    stacks_published: list[PublishedStack] = []
    written = 0
    with store.maintenance.exclusive("publish"), _folder_errors(place):
        # A server has one base, and cannot use stacks of another.
        folder = PublishedSubfolder.below(place, f"{_key(services)}_{services.base.digest[:12]}")
        folder.sweep()
        for number, user in enumerate(user_ids):
            progress(_STAGE, number / len(user_ids))
            with _publish_lock(store, user):
                adapter, reason = _build_adapter(services, read_adapter, user)
                record = _read_record(store, user, folder)
                digest = adapter.digest if adapter else None
                _write_record(store, user, folder, record.updated(digest))
                written += adapter is not None and folder.put(adapter)
            if adapter or users is not None:
                name = adapter.name if adapter else None
                stacks_published.append(PublishedStack(user, name, reason))
        removed = _remove_obsolete_of_users(store, folder, user_ids)
    progress(_STAGE, 1.0)
    return PublishReport(folder.path, tuple(stacks_published), written, removed)


@contextmanager
def unpublishing(services: Services, user: str) -> Iterator[Callable[[], None]]:
    """Block publications of a user, and yield a function that removes all there are.

    What cannot be reached stays recorded, and is removed by the next publication there.
    """
    with _publish_lock(services.store, user):
        yield partial(_unpublish, services.store, user)


def _unpublish(store: Store, user: str) -> None:
    for path, record in _read_records(store, user).items():
        folder = PublishedSubfolder(Path(path))
        _write_record(store, user, folder, record.updated(None))
        with suppress(OSError):
            _remove_obsolete(store, user, folder, _current_digests(store, folder))
            # Partial files of a killed publication. A running one needs them.
            with suppress(Busy), store.maintenance.exclusive("publish"):
                folder.sweep()


def _build_adapter(
    services: Services, read_adapter: Callable[[str], Adapter], user: str
) -> tuple[PublishedAdapter | None, str]:
    """Return a user's live stack as one adapter, or None and the reason why there is none."""
    try:
        stack = stacks.enabled_stack(services, user)
        if stack.is_bare:
            return None, "nothing is live"
        layers = [(read_adapter(each.digest), each.weight) for each in stack.entries if each.weight]
        return build_published_adapter(compose(layers), services.base), ""
    except (AdapterError, BaseMismatch, Damaged) as error:
        return None, error.message


def _remove_obsolete_of_users(
    store: Store, folder: PublishedSubfolder, users: Sequence[str]
) -> int:
    """Remove the obsolete stacks of users. Return how many there were."""
    affected = [user for user in users if _read_record(store, user, folder).obsolete]
    current = _current_digests(store, folder) if affected else frozenset()
    removed = 0
    for user in affected:
        with _publish_lock(store, user):
            removed += _remove_obsolete(store, user, folder, current)
    return removed


def _remove_obsolete(
    store: Store, user: str, folder: PublishedSubfolder, current: frozenset[str]
) -> int:
    """Remove a user's obsolete stacks that are no user's current one. Return how many."""
    record = _read_record(store, user, folder)
    removed = sorted(record.obsolete - current)
    for digest in removed:
        folder.remove(digest)
    _write_record(store, user, folder, PublicationRecord(record.current))
    return len(removed)


def _current_digests(store: Store, folder: PublishedSubfolder) -> frozenset[str]:
    """Return all users' current digests. An imported user may have the same as its original."""
    records = (_read_record(store, user.id, folder) for user in _all_users(store))
    return frozenset(record.current for record in records if record.current)


def _key(services: Services) -> str:
    """Return the random name of this home's folders, drawn once."""
    upkeep = services.store.maintenance
    key = upkeep.read_note("published")
    if key is None:
        key = services.clock.entropy(8).hex()
        upkeep.write_note("published", key)
    return key


def _read_record(store: Store, user: str, folder: PublishedSubfolder) -> PublicationRecord:
    return _read_records(store, user).get(str(folder.path), _NO_RECORD)


def _read_records(store: Store, user: str) -> dict[str, PublicationRecord]:
    """Return a user's records by the folder's path; none if the note cannot be read."""
    try:
        stored = json.loads(store.maintenance.read_note(f"published-{user}") or "{}")
        return {
            path: PublicationRecord(each["now"], frozenset(each["old"]))
            for path, each in stored.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_record(
    store: Store, user: str, folder: PublishedSubfolder, record: PublicationRecord
) -> None:
    records = _read_records(store, user)
    path = str(folder.path)
    if record == records.get(path, _NO_RECORD):
        return
    records[path] = record
    stored = {
        path: {"now": each.current, "old": sorted(each.obsolete)}
        for path, each in records.items()
        if each != _NO_RECORD
    }
    store.maintenance.write_note(f"published-{user}", json.dumps(stored))


def _all_users(store: Store) -> Iterator[UserSummary]:
    last = None
    while page := store.catalog.users(after=last, limit=1000):
        yield from page
        last = page[-1].id


def _users_with_layers(store: Store) -> tuple[str, ...]:
    """Return the users who may have a live or published stack. All others are skipped."""
    return tuple(
        user.id for user in _all_users(store) if user.revisions or _read_records(store, user.id)
    )


def _check_users(store: Store, users: Sequence[str]) -> tuple[str, ...]:
    if isinstance(users, str):
        raise InvalidInput(
            f"users must be a list of ids, got {users!a}.",
            hint="Give a list, or None for all users.",
        )
    user_ids = tuple(dict.fromkeys(users))
    for user in user_ids:
        check_user_id(user)
        store.catalog.user(user)
    return user_ids


@contextmanager
def _publish_lock(store: Store, user: str) -> Iterator[None]:
    """Hold a user's publication lock, which is one for all processes. Raises ``Busy``."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with ExitStack() as lease:
        while True:
            try:
                lease.enter_context(store.leases.acquire(f"publish-{user}"))
                break
            except Busy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
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
            hint="Make room there, or name another folder. Earlier publications are still there.",
        ) from error
