"""Publish live stacks to a folder or bucket, where other servers find them by name.

Invariants: a place holds one stack for each user ever published there. It is the stack that was
live at the user's last publication. Publishing an unchanged stack writes nothing. A record in the
home is written before any file, so an erasure finds all files even after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
    NotFound,
    map_write_errors,
)
from personalpeft.ids import check_user_id
from personalpeft.services import Services
from personalpeft.store.locks import publish_lease
from personalpeft.store.store import Store
from personalpeft.types import Progress

PUBLISHED = "published"
"""The note with the random name of a home's published folders."""
_STAGE = "Publishing"
# Seconds to wait for a user's lock. It is held while the user's files are written.
_LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PublishedStack:
    """The name under which servers find a user's stack, or None and why none was written."""

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


def publish(
    services: Services,
    read_adapter: Callable[[str], Adapter],
    place: Path,
    users: Sequence[str] | None,
    progress: Progress,
) -> PublishReport:
    """Implement ``Runtime.publish``, which documents the arguments.

    ``place`` is the folder. ``read_adapter`` reads an adapter by its packed file's digest.
    """
    store = services.store
    hint = "Make room there, or name another folder. Earlier publications are still there."
    with services.maintenance.exclusive("publish"), map_write_errors(place, hint=hint):
        user_ids = _users_with_layers(store) if users is None else _check_users(store, users)
        stacks_published: list[PublishedStack] = []
        damaged: set[str] = set()
        written = removed = 0
        # A server has one base, and cannot use stacks of another.
        folder = PublishedSubfolder.below(
            place, f"published_{_key(services)}_{services.base.digest[:12]}"
        )
        folder.sweep()
        for number, user in enumerate(user_ids):
            progress(_STAGE, number / len(user_ids))
            with _publish_lock(store, user):
                try:
                    adapter, reason = _build_adapter(services, read_adapter, user)
                except NotFound:
                    if users is not None:
                        raise
                    continue  # The user was forgotten after the list was read.
                except Damaged as error:
                    # Servers keep the stack that they have: `verify --repair` builds it again.
                    reason = f"{error.message} What was published before stays."
                    stacks_published.append(PublishedStack(user, None, reason))
                    damaged.add(user)
                    continue
                digest = adapter.digest if adapter else None
                store.publications.set_current(user, str(folder.path), digest)
                written += adapter is not None and folder.put(adapter)
            if adapter or users is not None:
                name = adapter.name if adapter else None
                stacks_published.append(PublishedStack(user, name, reason))
        # After all stacks are recorded: two users may have the same.
        for user in user_ids:
            if user in damaged:
                continue
            with _publish_lock(store, user):
                removed += _remove_former(store, user, folder)
    progress(_STAGE, 1.0)
    return PublishReport(folder.path, tuple(stacks_published), written, removed)


@contextmanager
def unpublishing(services: Services, user: str) -> Iterator[Callable[[], None]]:
    """Block publications of a user, and yield a function that removes all there are.

    What cannot be reached stays recorded, and is removed by the next publication there.
    """
    with _publish_lock(services.store, user):
        yield partial(_unpublish, services, user)


def _unpublish(services: Services, user: str) -> None:
    store = services.store
    for path in store.publications.folders(user):
        store.publications.set_current(user, path, None)
        folder = PublishedSubfolder(Path(path))
        with suppress(OSError):
            _remove_former(store, user, folder)
            # Partial files of a killed publication. A running one needs them.
            with suppress(Busy), services.maintenance.exclusive("publish"):
                folder.sweep()


def _build_adapter(
    services: Services, read_adapter: Callable[[str], Adapter], user: str
) -> tuple[PublishedAdapter | None, str]:
    """Return a user's live stack as one adapter, or None and the reason why there is none.

    Raises ``Damaged`` if an adapter file is missing or damaged.
    """
    try:
        stack = stacks.enabled_stack(services, user)
        if stack.is_bare:
            return None, "nothing is live"
        layers = [(read_adapter(each.digest), each.weight) for each in stack.entries if each.weight]
        return build_published_adapter(compose(layers), services.base), ""
    except (AdapterError, BaseMismatch) as error:
        return None, error.message


def _remove_former(store: Store, user: str, folder: PublishedSubfolder) -> int:
    """Remove a user's former stacks that are no user's current one. Return how many."""
    path = str(folder.path)
    removed = store.publications.removable_stacks(user, path)
    for digest in removed:
        folder.remove(digest)
    store.publications.delete_former_stacks(user, path)
    return len(removed)


def _key(services: Services) -> str:
    """Return the random name of this home's folders, drawn once."""
    maintenance = services.maintenance
    key = maintenance.read_note(PUBLISHED)
    if key is None:
        key = services.clock.entropy(8).hex()
        maintenance.write_note(PUBLISHED, key)
    return key


def _users_with_layers(store: Store) -> tuple[str, ...]:
    """Return the users who may have a live or published stack. All others are skipped."""
    published = store.publications.users()
    users = store.catalog.iter_users()
    return tuple(user.id for user in users if user.revisions or user.id in published)


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


def _publish_lock(store: Store, user: str) -> AbstractContextManager[None]:
    """Hold a user's publication lock. All processes share it. Raises ``Busy``."""
    return store.leases.acquire(publish_lease(user), timeout=_LOCK_SECONDS)
