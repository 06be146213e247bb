"""Many users: pages, shared files, and a bulk path that writes what single calls write."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from store_makers import BASE, add_fact, add_revision, beside, opened, output, packed

from benchmarks.bulk import NewRevision, add_revisions
from personalpeft.errors import Damaged, InvalidId, InvalidInput, NotFound
from personalpeft.store.integrity import verify
from personalpeft.store.store import Store
from personalpeft.types import StackEntry, Verdict


def new_revision(
    user: str,
    layer: str = "style",
    content: bytes = b"one",
    *,
    promote: bool = True,
    **changes: object,
) -> NewRevision:
    revision, blob = packed(user, layer, content, **changes)
    return NewRevision(revision, blob, {"verdict": str(revision.verdict)}, promote)


def dump_rows(home: Path) -> list[str]:
    """Return all rows except the times of migrations."""
    with closing(sqlite3.connect(home / "personalpeft.db")) as database:
        return sorted(line for line in database.iterdump() if "_sqlite_migrations" not in line)


@examples(10)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ada", "bob", "eve"]),
            st.sampled_from(["style", "skill.email", "memory"]),
            st.sampled_from([b"one", b"two"]),
            st.booleans(),
        ),
        max_size=10,
        unique_by=lambda each: each[:3],
    ),
    st.integers(1, 11),
)
def test_batches_of_any_size_write_the_same_rows_as_single_calls(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[str, str, bytes, bool]], batch: int
) -> None:
    builds = [
        new_revision(user, layer, content, promote=promote)
        for user, layer, content, promote in given
    ]
    singly, at_once = tmp_path_factory.mktemp("singly"), tmp_path_factory.mktemp("at-once")
    with _open_with_fixed_clock(singly) as store:
        for each in builds:
            store.catalog.ensure_user(each.revision.user)
            store.catalog.add_revision(
                each.revision, each.blob, each.report, promote=each.promote, cause="import"
            )
    with _open_with_fixed_clock(at_once) as store:
        assert add_revisions(store, builds, batch_size=batch) == len(builds)
        assert verify(store) == ()
    assert dump_rows(singly) == dump_rows(at_once)


def _open_with_fixed_clock(home: Path) -> Store:
    from datetime import UTC, datetime

    from personalpeft.store.home import open_store

    return open_store(home, now=lambda: datetime(2026, 1, 2, tzinfo=UTC), entropy=bytes)


def test_stack_of_several_layers_may_come_in_one_batch(store: Store) -> None:
    style = new_revision("ada")
    entry = StackEntry("style", style.revision.id, style.revision.digest)
    builds = [style, new_revision("bob"), new_revision("ada", "memory", b"memory", below=(entry,))]
    child = new_revision("ada", content=b"child", parent=style.revision.id)
    assert add_revisions(store, [*builds, child]) == 4
    assert [each.revision for each in store.catalog.stack("ada", BASE).entries] == [
        child.revision.id,
        builds[2].revision.id,
    ]
    assert store.catalog.revision("ada", child.revision.id).parent == style.revision.id
    assert verify(store) == ()


def test_existing_revision_is_skipped_and_not_made_live_again(store: Store) -> None:
    first, second = new_revision("ada"), new_revision("ada", content=b"two")
    reported: list[int] = []
    assert add_revisions(store, [first, second, first], batch_size=2, progress=reported.append) == 2
    assert reported == [2, 3]
    store.catalog.move_head("ada", "style", None, base=BASE, cause="rollback")
    assert add_revisions(store, [first, second]) == 0
    assert store.catalog.stack("ada", BASE).entries == ()
    assert len(store.catalog.reports("ada")) == 2
    assert verify(store) == ()


def test_one_blob_is_shared_by_many_users(store: Store) -> None:
    add_revisions(store, [new_revision(f"user-{n}") for n in range(50)])
    assert len(list((store.home / "blobs").rglob("*"))) == 2  # The folder and its file.
    assert verify(store) == ()


def test_an_invalid_revision_records_nothing(store: Store) -> None:
    add_fact(store, "ada")
    question = add_fact(store, "ada")
    add_revision(store, b"pins", signals={question.id: "pinned"})
    store.catalog.ensure_user("zoe")
    wrong: list[tuple[NewRevision, type[Exception]]] = [
        (new_revision("zoe", parent="style@000000000000"), NotFound),
        (new_revision("zoe", signals={question.id: "train"}), NotFound),
        (new_revision("ada", content=b"new", signals={question.id: "train"}), InvalidInput),
        (new_revision("zoe", digest="0" * 64, id="style@000000000000"), Damaged),
        (new_revision("zoe", recipe={"rate": float("nan")}), InvalidInput),
    ]
    before = store.catalog.revisions("ada")
    for each, error in wrong:
        with pytest.raises(error):
            store.catalog.add_revision(
                each.revision, each.blob, each.report, promote=True, cause="import"
            )
    assert store.catalog.revisions("ada") == before
    assert store.catalog.revisions("zoe") == ()
    assert verify(store) == ()


def _ids_by_page(store: Store, limit: int) -> Iterator[str]:
    after = None
    while page := store.catalog.users(after=after, limit=limit):
        yield from (user.id for user in page)
        after = page[-1].id


@pytest.mark.parametrize("limit", [1, 3, 10, 11])
def test_pages_of_users_hold_each_user_once_in_order(store: Store, limit: int) -> None:
    names = [f"user-{number}" for number in range(9)] + ["ada"]
    add_revisions(store, [new_revision(name) for name in names])
    assert list(_ids_by_page(store, limit)) == sorted(names)
    assert store.catalog.users(after="user-8") == ()
    assert [user.id for user in store.catalog.users(after="b", limit=2)] == ["user-0", "user-1"]
    with pytest.raises(InvalidInput):
        store.catalog.users(limit=0)
    for nobody in ("\ud800", "../ada", ""):
        with pytest.raises(InvalidId):
            store.catalog.users(after=nobody)
        with pytest.raises(NotFound):
            store.catalog.stack(nobody, BASE)


def test_another_process_sees_a_new_head_within_a_second(home: Path) -> None:
    with opened(home) as store:
        store.catalog.ensure_user("ada")
        add_revision(store)
        script = "with opened(home) as store: print(add_revision(store, b'two').id, time.time())"
        process = beside("import time\n" + script, home)
        seen = 0.0
        while not seen:
            live = store.catalog.stack("ada", BASE).entries[0].revision
            seen = time.time() if live != packed()[0].id else 0.0
            assert process.poll() in (None, 0)
        revision, at = output(process).split()
        assert live == revision
        assert seen - float(at) < 1


def test_refused_revisions_are_recorded_and_not_live(store: Store) -> None:
    add_revisions(store, [new_revision("ada", promote=False, verdict=Verdict.REFUSED)])
    assert store.catalog.stack("ada", BASE).entries == ()
    assert store.catalog.revisions("ada")[0].verdict is Verdict.REFUSED
