"""Only a valid home is opened, and a refusal changes nothing."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from store_makers import BASE, HIDE_PYSQLITE, Clock, add_fact, add_revision, beside, opened, output

from personalpeft.errors import HomeError, InvalidId
from personalpeft.store.database import JOURNAL_MODE, is_wal_safe
from personalpeft.store.home import open_store
from personalpeft.store.integrity import verify


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return the content of a folder, except the files that SQLite's readers keep beside a
    database.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.name.endswith("-shm")
        and not (path.name.endswith("-wal") and path.stat().st_size == 0)
    }


def with_sqlite(home: Path, *statements: str) -> None:
    with closing(sqlite3.connect(home / "personalpeft.db")) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def test_new_home_is_private_to_its_owner(tmp_path: Path) -> None:
    home = tmp_path / "not" / "yet" / "there"
    with opened(home) as store:
        add_fact(store)
        assert store.home == home
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "personalpeft.db").stat().st_mode) == 0o600


def test_home_readable_by_others_is_made_private(home: Path) -> None:
    opened(home).close()
    home.chmod(0o755)
    opened(home).close()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["a?b#c%41 d", "näme", "with'quote", "mode=ro&x"])
def test_home_may_have_any_name(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / name) as store:
        add_fact(store)
    assert (tmp_path / name / "personalpeft.db").is_file()
    with opened(tmp_path / name, read_only=True) as store:
        assert len(store.ledger.signals("ada")) == 1


def test_empty_folder_and_folder_of_cards_become_homes(home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "mine.toml").write_text("")
    with opened(home) as store:
        assert verify(store) == ()


def _foreign_database(home: Path) -> None:
    home.mkdir()
    with_sqlite(home, "create table recipes (id integer)")


def _text_file(home: Path) -> None:
    home.mkdir()
    (home / "personalpeft.db").write_text("not a database, " * 1000)


def _cut_short(home: Path) -> None:
    opened(home).close()
    database = home / "personalpeft.db"
    database.write_bytes(database.read_bytes()[:5000])


def _foreign_folder(home: Path) -> None:
    home.mkdir()
    (home / "thesis.tex").write_text("\\documentclass{article}")


def _a_file(home: Path) -> None:
    home.write_text("I am a file")


def _a_dangling_link(home: Path) -> None:
    home.symlink_to(home.parent / "nowhere")


def _below_a_file(home: Path) -> None:
    home.parent.joinpath("home").write_text("")


def _database_lost(home: Path) -> None:
    with opened(home) as store:
        store.blobs.put("ada", b"x")
    (home / "personalpeft.db").unlink()


def _database_emptied(home: Path) -> None:
    with opened(home) as store:
        store.blobs.put("ada", b"x")
    (home / "personalpeft.db").write_bytes(b"")


def _newer_version(home: Path) -> None:
    opened(home).close()
    with_sqlite(home, "pragma user_version = 99")


def _unknown_migration(home: Path) -> None:
    opened(home).close()
    with_sqlite(
        home,
        "insert into _sqlite_migrations (migration_set, name, applied_at)"
        " values ('personalpeft', '0999_telepathy', '2030-01-01')",
    )


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_foreign_database, "another program"),
        (_text_file, "damaged"),
        (_cut_short, "damaged"),
        (_foreign_folder, "not a home"),
        (_a_file, "not a folder"),
        (_a_dangling_link, "not a folder"),
        (_database_lost, "lost its database"),
        (_database_emptied, "lost its database"),
        (_newer_version, "newer version"),
        (_unknown_migration, "0999_telepathy"),
    ],
)
def test_invalid_home_is_refused_and_left_unchanged(
    tmp_path: Path, make: Callable[[Path], None], says: str, read_only: bool
) -> None:
    make(tmp_path / "home")
    before = listing(tmp_path)
    with pytest.raises(HomeError) as error:
        opened(tmp_path / "home", read_only=read_only)
    assert says in error.value.message
    assert str(tmp_path / "home") in error.value.message
    assert error.value.hint
    assert listing(tmp_path) == before


def test_home_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError):
        opened(tmp_path / "file" / "home")


def test_home_of_another_account_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(home).close()
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    with pytest.raises(HomeError) as error:
        opened(home)
    assert error.value.hint


def test_interrupted_creation_of_a_home_is_completed(home: Path) -> None:
    home.mkdir()
    (home / "write.lock").touch()
    (home / "personalpeft.db").touch()
    with opened(home) as store:
        add_fact(store)
        assert verify(store) == ()


def test_two_processes_may_create_the_same_home_at_once(home: Path) -> None:
    script = "store = opened(home); print(add_fact(store, sys.argv[2]).id)"
    processes = [beside(script, home, f"user-{number}") for number in range(4)]
    for process in processes:
        output(process)
    with opened(home) as store:
        assert len(store.catalog.users()) == 4
        assert verify(store) == ()


def test_read_only_open_creates_no_home(home: Path) -> None:
    with pytest.raises(HomeError) as error:
        opened(home, read_only=True)
    assert str(home) in error.value.message
    assert not home.exists()


WRITES: list[Callable[[object], object]] = [
    lambda store: add_fact(store),  # type: ignore[arg-type]
    lambda store: store.ledger.retract("ada", "s_"),  # type: ignore[attr-defined]
    lambda store: store.catalog.ensure_user("bob"),  # type: ignore[attr-defined]
    lambda store: store.catalog.move_head("ada", "style", None, base=BASE, cause=""),  # type: ignore[attr-defined]
    lambda store: add_revision(store, b"two"),  # type: ignore[arg-type]
    lambda store: store.blobs.put("ada", b"x"),  # type: ignore[attr-defined]
    lambda store: store.leases.acquire("learn-ada").__enter__(),  # type: ignore[attr-defined]
    lambda store: store.save_checkpoint("ada", "style", b"x"),  # type: ignore[attr-defined]
]


def test_read_only_store_reads_all_and_writes_nothing(home: Path) -> None:
    with opened(home) as store:
        fact = add_fact(store)
        revision = add_revision(store)
    before = listing(home)
    with opened(home, read_only=True) as store:
        assert store.ledger.signals("ada") == (fact,)
        assert store.catalog.revisions("ada") == (revision,)
        assert store.blobs.read(revision.digest)
        assert verify(store) == ()
        for write in WRITES:
            with pytest.raises(HomeError) as error:
                write(store)
            assert "read-only" in error.value.message
    assert listing(home) == before


# Permissions do not bind root, so a root process first becomes another account that owns the
# home.
_READ_AS_OWNER_OF_A_SEALED_HOME = """
import store_makers
from personalpeft.errors import HomeError
import personalpeft.store.home
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
with opened(home) as store:
    print(len(store.ledger.signals("ada")), len(verify(store)))
    for write in (lambda: add_fact(store), lambda: store.leases.acquire("learn-ada").__enter__(), lambda: add_revision(store)):
        try:
            write()
        except HomeError as error:
            print(error.message)
"""


@pytest.mark.parametrize(
    "left_open",
    [
        pytest.param(False, id="closed", marks=pytest.mark.exhaustive),
        pytest.param(True, id="killed with changes in its journal"),
    ],
)
def test_home_without_write_permission_can_be_read(tmp_path: Path, left_open: bool) -> None:
    home = tmp_path / "home"
    script = (
        "store = opened(home); add_fact(store); add_revision(store); print('ready', flush=True)"
    )
    process = beside(script + ("; sys.stdin.read()" if left_open else "; store.close()"), home)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if left_open:
        process.kill()
    process.communicate(timeout=60)

    account = 65534 if os.getuid() == 0 else os.getuid()
    for folder in (home, *home.rglob("*")):
        folder.chmod(0o500 if folder.is_dir() else 0o400)
        os.chown(folder, account, -1)
    for above in home.parents:
        if (
            above.stat().st_uid == os.getuid()
            and tmp_path.is_relative_to(above)
            and above != Path("/")
        ):
            above.chmod(above.stat().st_mode | 0o011)
    try:
        ended = beside(_READ_AS_OWNER_OF_A_SEALED_HOME, home, account)
        first, *refusals = output(ended).splitlines()
    finally:
        home.chmod(0o700)
    assert first == "1 0"
    assert len(refusals) == 3
    assert all("read-only" in refusal for refusal in refusals)


def test_session_is_stored_whole_until_it_is_replaced_or_deleted(home: Path) -> None:
    with opened(home) as store:
        assert store.load_checkpoint("ada", "skill.email") is None
        for data in (b"first", b"second"):
            store.save_checkpoint("ada", "skill.email", data)
            assert store.load_checkpoint("ada", "skill.email") == data
        assert store.load_checkpoint("ada", "style") is None
        for user, layer in (("..", "style"), ("ada", ".."), ("a/b", "style"), ("ada", "skill.")):
            with pytest.raises(InvalidId):
                store.save_checkpoint(user, layer, b"x")
        store.delete_checkpoint("ada", "skill.email")
        store.delete_checkpoint("ada", "skill.email")
        assert store.load_checkpoint("ada", "skill.email") is None


def test_forked_child_cannot_use_its_parents_connections(home: Path) -> None:
    script = """
from personalpeft.errors import HomeError
store = opened(home)
add_fact(store)
child = os.fork()
if child == 0:
    for use in (lambda: store.ledger.signals("ada"), lambda: add_fact(store)):
        try:
            use()
        except HomeError:
            print("refused", flush=True)
    os._exit(0)
os.waitpid(child, 0)
add_fact(store)
"""
    assert output(beside("import os\n" + script, home)).splitlines() == ["refused", "refused"]
    with opened(home) as store:
        assert len(store.ledger.signals("ada")) == 2
        assert verify(store) == ()


def test_a_block_inside_a_transaction_of_its_thread_is_a_part_of_it(home: Path) -> None:
    with opened(home) as store:
        with suppress(KeyboardInterrupt), store.database.write_transaction():
            add_fact(store)
            assert len(store.ledger.signals("ada")) == 1
            raise KeyboardInterrupt
        assert store.catalog.users() == ()
        with store.database.write_transaction():
            add_fact(store)
        assert len(store.ledger.signals("ada")) == 1


def test_times_need_a_time_zone(home: Path) -> None:
    store = open_store(home, now=lambda: Clock()().replace(tzinfo=None), entropy=os.urandom)
    with store, pytest.raises(ValueError, match="zone"):
        add_fact(store)


def test_sqlite_with_the_wal_reset_bug_uses_no_wal() -> None:
    safe = [(3, 44, 6), (3, 44, 9), (3, 50, 7), (3, 51, 3), (3, 52, 0), (4, 0, 0)]
    unsafe = [(3, 40, 1), (3, 44, 5), (3, 45, 0), (3, 46, 1), (3, 50, 6), (3, 51, 0), (3, 51, 2)]
    assert [is_wal_safe(version) for version in safe] == [True] * len(safe)
    assert [is_wal_safe(version) for version in unsafe] == [False] * len(unsafe)


def test_importing_the_store_loads_no_sqlite() -> None:
    script = "import sys, personalpeft.store; print(any('sqlite' in name for name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


_WITH_THE_STANDARD_SQLITE = f"""{HIDE_PYSQLITE}
import sqlite3
from personalpeft.store.database import JOURNAL_MODE, is_wal_safe
assert JOURNAL_MODE == ("wal" if is_wal_safe(sqlite3.sqlite_version_info) else "truncate")
"""


def test_without_pysqlite3_each_connection_uses_a_safe_journal_mode(
    home: Path,
) -> None:
    """A truncated journal stays as an empty file.

    DELETE, which may lose an acknowledged commit, would leave none.
    """
    script = """
with opened(home) as store:
    add_fact(store)
with opened(home) as store:
    add_fact(store)
    add_revision(store)
    beside = home / ("personalpeft.db-wal" if JOURNAL_MODE == "wal" else "personalpeft.db-journal")
    assert beside.exists()
    assert JOURNAL_MODE == "wal" or beside.stat().st_size == 0
    assert verify(store) == ()
"""
    output(beside(_WITH_THE_STANDARD_SQLITE + script, home))


_WRITES_FOR_A_WHILE = """
import threading
with opened(home, timeout=5) as store:
    print("open", flush=True)
    sys.stdin.readline()
    for number in range(40):
        add_fact(store, text=f"{sys.argv[2]} {number}")
        store.ledger.signals("ada")
    print("written", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "maker",
    [
        pytest.param("newer", marks=pytest.mark.exhaustive),
        "older",
        pytest.param("both", marks=pytest.mark.exhaustive),
    ],
)
def test_two_sqlite_libraries_write_to_one_home_concurrently(home: Path, maker: str) -> None:
    """One library has the fix of the WAL-reset bug. The standard library's may lack it."""
    preludes = {"newer": "", "older": _WITH_THE_STANDARD_SQLITE}
    if maker in preludes:
        output(beside(preludes[maker] + "with opened(home) as store: add_fact(store)", home))
    order = sorted(preludes, key=lambda name: name != maker)
    writers = [beside(preludes[name] + _WRITES_FOR_A_WHILE, home, name) for name in order]
    for line in ("open", "written"):
        # Both have the home open from the first write to the last.
        assert [_line(writer) for writer in writers] == [f"{line}\n"] * 2
        for writer in writers:
            writer.stdin.write("go on\n")  # type: ignore[union-attr]
            writer.stdin.flush()  # type: ignore[union-attr]
    for writer in writers:
        output(writer)
    with opened(home) as store:
        texts = {signal.payload["text"] for signal in store.ledger.signals("ada")}
        assert texts >= {f"{name} {number}" for name in preludes for number in range(40)}
        assert verify(store) == ()


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline()  # type: ignore[union-attr]
    assert line, output(process)
    return line


def _keeps_a_log(home: Path) -> bool:
    """Return whether the database file has a write-ahead log.

    The check runs in another process: closing the file here would release this process's locks.
    """
    script = "import sys; print(list(open(sys.argv[1], 'rb').read(20)[18:]))"
    program = [sys.executable, "-I", "-S", "-c", script, home / "personalpeft.db"]
    return subprocess.check_output(program, text=True) == "[2, 2]\n"


@pytest.mark.skipif(
    JOURNAL_MODE != "wal" or is_wal_safe(sqlite3.sqlite_version_info),
    reason="takes a safe and an unsafe SQLite",
)
@pytest.mark.exhaustive
def test_sqlite_with_the_bug_leaves_wal_mode_once_it_is_alone(
    home: Path,
) -> None:
    older = _WITH_THE_STANDARD_SQLITE + "with opened(home, timeout=30) as store: add_fact(store)"
    with opened(home) as store:
        add_fact(store)
        assert _keeps_a_log(home)
        began = time.monotonic()
        output(beside(older, home))
        assert time.monotonic() - began < 20
        assert _keeps_a_log(home)
    output(beside(older, home))
    assert not _keeps_a_log(home)
    for _ in range(2):
        with opened(home) as store:
            add_fact(store)
            # A journal mode that is safe for both is kept by both.
            assert not _keeps_a_log(home)
            assert (home / "personalpeft.db-journal").stat().st_size == 0
    with opened(home) as store:
        assert len(store.ledger.signals("ada")) == 5
        assert verify(store) == ()


def test_second_sqlite_opens_and_reads_the_home_during_a_write(home: Path) -> None:
    read = "with opened(home, timeout=0.1) as store: print(len(store.ledger.signals('ada')))"
    with opened(home) as store:
        add_fact(store)
        with store.database.write_lock():
            assert output(beside(_WITH_THE_STANDARD_SQLITE + read, home)) == "1\n"
