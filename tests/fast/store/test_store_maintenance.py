"""Maintenance: exclusive tasks, notes, the time of the last activity, and backups."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from runtime_makers import FakeTime, ask, correct, home_contents, open_runtime

import personalpeft
from personalpeft import Busy, HomeError, InvalidInput


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_task_has_one_named_holder_until_it_is_released(home: Path) -> None:
    with open_runtime(home) as runtime, open_runtime(home) as other:
        assert runtime.maintenance.holder("daemon") is None
        with runtime.maintenance.exclusive("daemon"):
            assert f"process {os.getpid()}" in (other.maintenance.holder("daemon") or "")
            with pytest.raises(Busy, match="this process"), other.maintenance.exclusive("daemon"):
                pass
        assert other.maintenance.holder("daemon") is None
        with other.maintenance.exclusive("daemon"):
            pass


def test_note_is_replaced_whole_and_readable_read_only(home: Path) -> None:
    with open_runtime(home) as runtime:
        assert runtime.maintenance.read_note("daemon") is None
        runtime.maintenance.write_note("daemon", "one")
        runtime.maintenance.write_note("daemon", "two")
        (file,) = (home / "notes").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
    with open_runtime(home, read_only=True) as runtime:
        assert runtime.maintenance.read_note("daemon") == "two"
        with pytest.raises(HomeError, match="read-only"):
            runtime.maintenance.write_note("daemon", "three")
        with pytest.raises(HomeError, match="read-only"), runtime.maintenance.exclusive("daemon"):
            pass


def test_last_activity_is_visible_to_other_processes(home: Path) -> None:
    time = FakeTime(at=datetime(2030, 1, 1, tzinfo=UTC))
    with open_runtime(home) as other:
        assert other.maintenance.last_activity() is None
        with open_runtime(home, clock=time.clock()) as runtime:
            stream = runtime.user("ada").stream("hello", temperature=0)
            first = other.maintenance.last_activity()
            assert first is not None
            assert first >= datetime(2030, 1, 1, tzinfo=UTC)
            time.seconds += 5
            list(stream)
            assert (other.maintenance.last_activity() or first) > first


def test_backup_is_a_home_with_all_live_data(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn()
        (home / "config.toml").write_text("[daemon]\n")
        before = ask(ada, "question 1", memory=False).text
        made = runtime.maintenance.back_up(tmp_path / "copies")
        rows, _ = home_contents(home)
        later = ask(ada, "later")
    assert (made.files, made.missing, made.removed) == (1, (), ())
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert (made.path / "config.toml").exists()
    assert sorted(path.name for path in made.path.iterdir()) == [
        "blobs",
        "config.toml",
        "home-id",
        "personalpeft.db",
    ]
    assert home_contents(made.path)[0] == rows
    with open_runtime(made.path) as copy:
        assert copy.verify() == ()
        assert ask(copy.user("ada"), "question 1", memory=False).text == before
        assert later.turn_id not in {turn.id for turn in copy.user("ada").turns()}


def test_backup_keeps_the_journal_mode_of_its_home(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        ask(runtime.user("ada"))
        made = runtime.maintenance.back_up(tmp_path / "copies")
    journals = [
        folder.joinpath("personalpeft.db").read_bytes()[18:20] for folder in (home, made.path)
    ]
    assert journals[0] == journals[1]


def test_newest_backups_stay_whatever_the_clock_and_share_their_files(
    home: Path, tmp_path: Path
) -> None:
    time, copies = FakeTime(), tmp_path / "copies"
    (copies / "copy-000009-20200101.part").mkdir(parents=True)
    (copies / "mine.txt").write_text("not a copy")
    with open_runtime(home, clock=time.clock()) as runtime:
        correct(runtime.user("ada"))
        runtime.user("ada").learn()
        made = []
        for _ in range(4):
            made.append(runtime.maintenance.back_up(copies, keep=2))
            time.at -= timedelta(days=9)
    assert sorted(path.name for path in copies.iterdir()) == [
        *(each.path.name for each in made[-2:]),
        "home-id",
        "mine.txt",
    ]
    assert [len(each.removed) for each in made] == [0, 0, 1, 1]
    blobs = [next(each.path.glob("blobs/*/*")) for each in made[-2:]]
    assert blobs[0].samefile(blobs[1])
    assert not blobs[0].samefile(next(home.glob("blobs/*/*")))


def test_damaged_blob_is_reported_and_taken_from_the_previous_backup(
    home: Path, tmp_path: Path
) -> None:
    with open_runtime(home) as runtime:
        correct(runtime.user("ada"))
        runtime.user("ada").learn()
        runtime.maintenance.back_up(tmp_path / "with")
        blob = next(home.glob("blobs/*/*"))
        blob.write_bytes(b"no adapter")
        assert runtime.maintenance.back_up(tmp_path / "without").missing == (blob.name,)
        assert runtime.maintenance.back_up(tmp_path / "with").missing == ()
    with open_runtime(sorted((tmp_path / "with").glob("copy-*"))[-1]) as copy:
        assert copy.verify() == ()


def test_damage_to_a_backup_does_not_reach_the_next_one(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn()
        file = runtime.plugin_data("parrots").put_file(b"a parrot")
        # macOS writes such a file beside each on a stick.
        (home / "parrots" / "._data.sqlite3").write_bytes(b"not ours")
        runtime.plugin_data("parrots").connect().close()
        first = runtime.maintenance.back_up(tmp_path / "copies").path
        for path in (next(first.glob("blobs/*/*")), first / "parrots" / "files" / file):
            data = path.read_bytes()
            with path.open("r+b") as damaged:
                damaged.write(bytes([data[0] ^ 1]))
        second = runtime.maintenance.back_up(tmp_path / "copies")
        assert second.missing == ()
    with open_runtime(second.path) as copy:
        assert copy.verify() == ()
        assert copy.plugin_data("parrots").read_file(file) == b"a parrot"


def test_folder_with_the_backups_of_another_home_is_refused(home: Path, tmp_path: Path) -> None:
    copies, other = tmp_path / "copies", tmp_path / "other"
    with open_runtime(home) as runtime:
        ask(runtime.user("ada"))
        first = runtime.maintenance.back_up(copies).path
        # As an earlier version left them.
        for each in (first, copies, home):
            (each / "home-id").unlink()
        assert runtime.maintenance.back_up(copies).path.name.startswith("copy-000002")
    before = home_contents(copies / first)
    with open_runtime(other) as runtime:
        ask(runtime.user("bo"))
        with pytest.raises(InvalidInput, match="another home"):
            runtime.maintenance.back_up(copies, keep=1)
        assert not [*other.glob("*id"), *other.glob("backup-folders*")]
    assert home_contents(copies / first) == before
    with open_runtime(other) as runtime:
        runtime.maintenance.back_up(tmp_path / "others")
    # The id of a home comes back with it, also from a copy that has none.
    for copy in (first, *copies.glob("copy-000002*")):
        personalpeft.restore(copy, home, replace=True)
        with open_runtime(home) as runtime:
            assert runtime.maintenance.back_up(copies).path.parent == copies


def test_invalid_backups_are_refused(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime, pytest.raises(InvalidInput):
        runtime.maintenance.back_up(tmp_path / "copies", keep=0)
    (tmp_path / "file").write_text("")
    with open_runtime(home) as runtime, pytest.raises(HomeError):
        runtime.maintenance.back_up(tmp_path / "file")
