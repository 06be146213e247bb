"""Record revisions of many users in a home, in a few large transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from personalpeft.store.hash_chain import create_user
from personalpeft.store.revisions import check_revision, is_recorded, record_revision
from personalpeft.store.store import Store
from personalpeft.types import Json, Revision


@dataclass(frozen=True, slots=True)
class NewRevision:
    """A revision to record: its packed file, its report, and whether it becomes the head."""

    revision: Revision
    blob: bytes
    report: Json
    promote: bool = True


def add_revisions(
    store: Store,
    new: Iterable[NewRevision],
    *,
    batch_size: int = 1000,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Record revisions in order, each batch in one durable transaction; create missing users.

    The rows are those of ``Catalog.add_revision``. Recorded revisions are skipped, so the call can
    be repeated after a kill. Memory does not grow with the number of revisions.

    Args:
        store: The home.
        new: The revisions.
        batch_size: How many make a batch.
        progress: Receives after each batch how many were read.

    Returns:
        How many were added.
    """
    source, done, added = iter(new), 0, 0
    while batch := list(islice(source, batch_size)):
        with store.database.write_transaction() as db:
            at, files = store.now(), dict[tuple[str, str], bytes]()
            for each in batch:
                revision = each.revision
                check_revision(revision, each.blob)
                create_user(db, revision.user, at)
                if not is_recorded(db, revision):
                    record_revision(
                        db, revision, each.report, promote=each.promote, cause="import", at=at
                    )
                    files[revision.user, revision.digest] = each.blob
                    added += 1
            store.blobs.put_many((user, blob) for (user, _), blob in files.items())
        done += len(batch)
        progress(done)
    return added
