"""A task has one holder, a note is whole, and a copy of a home is a home."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from runtime_makers import Time, ask, correct, everything, opened

from personalpeft import Busy, HomeError, InvalidInput


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_task_has_one_holder_who_is_named_until_it_is_let_go(home: Path) -> None:
    with opened(home) as runtime, opened(home) as other:
        assert runtime.maintenance.holder("daemon") is None
        with runtime.maintenance.exclusive("daemon"):
            assert f"process {os.getpid()}" in (other.maintenance.holder("daemon") or "")
            with pytest.raises(Busy, match=str(os.getpid())), other.maintenance.exclusive("daemon"):
                pass
        assert other.maintenance.holder("daemon") is None
        with other.maintenance.exclusive("daemon"):
            pass


def test_a_note_is_replaced_as_a_whole_and_read_by_who_may_only_read(home: Path) -> None:
    with opened(home) as runtime:
        assert runtime.maintenance.read_note("daemon") is None
        runtime.maintenance.write_note("daemon", "one")
        runtime.maintenance.write_note("daemon", "two")
        (file,) = (home / "notes").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
    with opened(home, read_only=True) as runtime:
        assert runtime.maintenance.read_note("daemon") == "two"
        with pytest.raises(HomeError, match="read-only"):
            runtime.maintenance.write_note("daemon", "three")
        with pytest.raises(HomeError, match="read-only"), runtime.maintenance.exclusive("daemon"):
            pass


def test_whoever_is_being_answered_is_seen_from_outside(home: Path) -> None:
    time = Time(at=datetime(2030, 1, 1, tzinfo=UTC))
    with opened(home) as other:
        assert other.maintenance.last_activity() is None
        with opened(home, clock=time.clock()) as runtime:
            stream = runtime.user("ada").stream("hello", temperature=0)
            first = other.maintenance.last_activity()
            assert first is not None
            assert first >= datetime(2030, 1, 1, tzinfo=UTC)
            time.seconds += 5
            list(stream)
            assert (other.maintenance.last_activity() or first) > first


def test_a_copy_is_a_home_with_all_that_was_live(home: Path, tmp_path: Path) -> None:
    with opened(home) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn()
        (home / "config.toml").write_text("[daemon]\n")
        said = ask(ada, "question 1", memory=False).text
        made = runtime.maintenance.back_up(tmp_path / "copies")
        rows, _ = everything(home)
        later = ask(ada, "later")
    assert (made.files, made.missing, made.removed) == (1, (), ())
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert (made.path / "config.toml").exists()
    assert sorted(path.name for path in made.path.iterdir()) == [
        "blobs",
        "config.toml",
        "personalpeft.db",
    ]
    assert everything(made.path)[0] == rows
    with opened(made.path) as copy:
        assert copy.verify() == ()
        assert ask(copy.user("ada"), "question 1", memory=False).text == said
        assert later.turn_id not in {turn.id for turn in copy.user("ada").turns()}


def test_a_copy_keeps_the_journal_of_its_home(home: Path, tmp_path: Path) -> None:
    with opened(home) as runtime:
        ask(runtime.user("ada"))
        made = runtime.maintenance.back_up(tmp_path / "copies")
    journals = [
        folder.joinpath("personalpeft.db").read_bytes()[18:20] for folder in (home, made.path)
    ]
    assert journals[0] == journals[1]


def test_the_newest_copies_stay_whatever_the_clock_says_and_share_their_files(
    home: Path, tmp_path: Path
) -> None:
    time, copies = Time(), tmp_path / "copies"
    (copies / "copy-000009-20200101.part").mkdir(parents=True)
    (copies / "mine.txt").write_text("not a copy")
    with opened(home, clock=time.clock()) as runtime:
        correct(runtime.user("ada"))
        runtime.user("ada").learn()
        made = []
        for _ in range(4):
            made.append(runtime.maintenance.back_up(copies, keep=2))
            time.at -= timedelta(days=9)
    assert sorted(path.name for path in copies.iterdir()) == [
        *(each.path.name for each in made[-2:]),
        "mine.txt",
    ]
    assert [len(each.removed) for each in made] == [0, 0, 1, 1]
    blobs = [next(each.path.glob("blobs/*/*")) for each in made[-2:]]
    assert blobs[0].samefile(blobs[1])
    assert not blobs[0].samefile(next(home.glob("blobs/*/*")))


def test_a_damaged_file_is_named_and_comes_from_the_copy_before_where_that_has_it(
    home: Path, tmp_path: Path
) -> None:
    with opened(home) as runtime:
        correct(runtime.user("ada"))
        runtime.user("ada").learn()
        runtime.maintenance.back_up(tmp_path / "with")
        blob = next(home.glob("blobs/*/*"))
        blob.write_bytes(b"no adapter")
        assert runtime.maintenance.back_up(tmp_path / "without").missing == (blob.name,)
        assert runtime.maintenance.back_up(tmp_path / "with").missing == ()
    with opened(sorted((tmp_path / "with").iterdir())[-1]) as copy:
        assert copy.verify() == ()


def test_no_copies_are_refused(home: Path, tmp_path: Path) -> None:
    with opened(home) as runtime, pytest.raises(InvalidInput):
        runtime.maintenance.back_up(tmp_path / "copies", keep=0)
    (tmp_path / "file").write_text("")
    with opened(home) as runtime, pytest.raises(HomeError):
        runtime.maintenance.back_up(tmp_path / "file")
