"""Garbage collection deletes unreferenced old files and nothing else, also beside readers and
writers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_makers import BASE, add_fact, add_revision, beside, opened, output, packed

from personalpeft.errors import HomeError
from personalpeft.store.gc import collect_garbage, delete_partial_files
from personalpeft.store.integrity import verify
from personalpeft.store.maintenance import Maintenance
from personalpeft.store.store import Store
from personalpeft.store.types import GarbageReport

_LONG_AGO = 1_000_000_000.0  # 2001. The clock of these tests starts in January 2026.


def make_old(path: Path) -> Path:
    os.utime(path, (_LONG_AGO, _LONG_AGO))
    return path


def files(home: Path) -> set[str]:
    return {
        str(p.relative_to(home))
        for name in ("blobs", "sessions")
        for p in (home / name).rglob("*")
        if p.is_file()
    }


@pytest.fixture
def cluttered(home: Path) -> Path:
    """Return a closed home with an old unreferenced blob, partial file and session."""
    with opened(home) as store:
        fact = add_fact(store)
        revision = add_revision(store, signals={fact.id: "trained"})
        refused = add_revision(store, b"refused", promote=False)
        loose = store.blobs.path(store.blobs.put("ada", b"nobody names me"))
        store.save_checkpoint("ada", "style", b"x" * 10)
        for digest in (revision.digest, refused.digest):
            make_old(store.blobs.path(digest))
        make_old(loose)
        half = store.blobs.path(revision.digest).parent / ".0123-xyz.part"
        half.write_bytes(b"half")
        make_old(home / "sessions" / "ada" / "style.session")
    return home


def test_unreferenced_files_are_deleted_and_referenced_ones_stay(cluttered: Path) -> None:
    with opened(cluttered) as store:
        before = files(cluttered)
        reported: list[float] = []
        dry = collect_garbage(store, dry_run=True)
        assert files(cluttered) == before
        found = collect_garbage(store, progress=reported.append)
        assert found == GarbageReport(
            blobs=1, parts=1, sessions=1, bytes=len(b"nobody names me") + 4 + 10
        )
        assert dry == replace(found, dry_run=True)
        assert reported == sorted(reported)
        assert reported[-1] == 1.0
        assert len(files(cluttered)) == len(before) - 3
        assert not (cluttered / "sessions" / "ada").exists()
        assert verify(store) == ()
        assert all(store.blobs.read(each.digest) for each in store.catalog.revisions("ada"))
        assert collect_garbage(store) == GarbageReport()
        store.save_checkpoint("ada", "style", b"again")


def test_young_files_stay(store: Store) -> None:
    candidate = store.blobs.put("ada", b"the gate still judges me")
    store.save_checkpoint("ada", "style", b"in use")
    assert collect_garbage(store) == GarbageReport()
    assert store.blobs.read(candidate)
    assert store.load_checkpoint("ada", "style") == b"in use"


def test_blob_that_is_written_again_is_young_again(store: Store) -> None:
    place = make_old(store.blobs.path(store.blobs.put("ada", b"back again")))
    store.blobs.put("ada", b"back again")
    assert collect_garbage(store) == GarbageReport()
    assert place.is_file()


def test_deleted_candidate_is_written_again_with_its_row(store: Store) -> None:
    store.catalog.ensure_user("ada")
    make_old(store.blobs.path(store.blobs.put("ada", packed()[1])))
    assert collect_garbage(store).blobs == 1
    revision = add_revision(store)
    assert store.blobs.read(revision.digest)
    assert verify(store) == ()


def test_foreign_files_are_left_alone(store: Store) -> None:
    add_fact(store)
    add_revision(store)
    folder = next(path for path in (store.home / "blobs").iterdir())
    others = [
        make_old(_written(path))
        for path in (folder / "notes.txt", store.home / "blobs" / "readme", folder / "\udcff")
    ]
    # Of the system: they come again whenever it shows or copies the folder.
    hidden = [make_old(_written(folder / name)) for name in (".DS_Store", "._readme")]
    assert collect_garbage(store) == GarbageReport()
    assert all(path.exists() for path in others + hidden)
    problems = verify(store)
    assert [problem.fault for problem in problems] == ["It is not a blob."] * 3
    assert not any("gc" in problem.remedy for problem in problems)


def _written(path: Path) -> Path:
    path.write_bytes(b"mine")
    return path


def test_damaged_blob_of_a_revision_stays(store: Store) -> None:
    store.catalog.ensure_user("ada")
    place = store.blobs.path(add_revision(store).digest)
    place.write_bytes(b"hurt")
    make_old(place)
    assert collect_garbage(store) == GarbageReport()
    assert place.is_file()


def test_read_only_home_can_be_inspected_and_not_cleaned(cluttered: Path) -> None:
    before = files(cluttered)
    with opened(cluttered, read_only=True) as store:
        assert collect_garbage(store, dry_run=True).blobs == 1
        with pytest.raises(HomeError) as error:
            collect_garbage(store)
        assert "read-only" in error.value.message
    assert files(cluttered) == before


# Each blob looks a year old to this process, so only the write lock and the rows protect new
# ones.
_COLLECT_WITHOUT_END = """
from datetime import timedelta
from personalpeft.store.home import open_store
clock = Clock()
store = open_store(home, now=lambda: clock() + timedelta(days=3650), entropy=os.urandom)
print("ready", flush=True)
taken = 0
while not (home / "models").exists():
    taken += collect_garbage(store).blobs
print(taken)
"""


@pytest.mark.exhaustive
def test_referenced_files_stay_beside_concurrent_writers(home: Path) -> None:
    opened(home).close()
    collector = beside(_COLLECT_WITHOUT_END, home)
    assert collector.stdout is not None
    assert collector.stdout.readline() == "ready\n"
    script = """
store = opened(home)
store.catalog.ensure_user(sys.argv[2])
for number in range(40):
    revision = add_revision(store, f"{sys.argv[2]} {number % 20}".encode(), user=sys.argv[2])
    assert store.blobs.read(store.catalog.stack(sys.argv[2], BASE).entries[0].digest)
    store.blobs.put("ada", f"loose {sys.argv[2]} {number}".encode())
"""
    try:
        for writer in [beside(script, home, user) for user in ("ada", "bob")]:
            output(writer)
        (home / "models").mkdir()
        assert int(collector.communicate(timeout=60)[0]) > 0
    finally:
        collector.kill()  # The writer exits with 0 only if all went well.
    with opened(home) as store:
        for user in ("ada", "bob"):
            assert len(store.catalog.revisions(user)) == 20
            assert store.catalog.stack(user, BASE).entries
        assert [problem for problem in verify(store) if "Harmless" not in problem.remedy] == []


@pytest.mark.parametrize(
    "delete", [delete_partial_files, lambda store: collect_garbage(store).parts]
)
def test_what_killed_programs_left_unfinished_is_deleted(
    home: Path, tmp_path: Path, delete: Callable[[Store], int]
) -> None:
    with opened(home) as store:
        add_fact(store)
        store.save_checkpoint("ada", "style", b"x")
        left = [
            home / "notes" / ".published.js-1.part",
            home / ".backup-folde-2.part",
            home / "sessions" / "ada" / ".style.sessio-3.part",
        ]
        for path in left:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"half")
        # Their writer may be alive while a learn runs.
        with store.leases.acquire("learn-ada"):
            assert delete(store) == 2
        assert delete(store) == 1
        assert not any(path.exists() for path in left)
        assert store.load_checkpoint("ada", "style") == b"x"


def test_backup_that_was_killed_is_deleted(home: Path, tmp_path: Path) -> None:
    script = """
import os
from personalpeft import file_system
from personalpeft.store.maintenance import Maintenance
store = opened(home)
add_fact(store)
file_system.sync_folder = lambda folder: os._exit(0)
Maintenance(store).back_up(Path(sys.argv[2]))
"""
    output(beside(script, home, tmp_path / "copies"))
    with opened(home) as store:
        (part,) = (tmp_path / "copies").glob("copy-*")
        with Maintenance(store).exclusive("backup"):
            assert delete_partial_files(store) == 0
        assert part.exists()
        assert delete_partial_files(store) == 1
        assert not part.exists()
