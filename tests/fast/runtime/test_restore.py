"""A lost or damaged home comes back from a backup, and what was forgotten stays forgotten."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from runtime_makers import ask, correct, greedy, home_contents, open_runtime

import personalpeft
from personalpeft import (
    Busy,
    Damaged,
    Forgotten,
    HomeError,
    InvalidInput,
    NotFound,
    file_system,
)
from personalpeft.store import database

SECRET = "My locker code is 4711."


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with two users and a live layer, backed up to ``copies``."""
    with open_runtime(tmp_path / "home") as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        correct(ada, 6)
        ada.learn()
        ada.remember(SECRET)
        ask(bo, "I am Bo.")
        runtime.maintenance.back_up(tmp_path / "copies")
    return tmp_path / "home"


def test_restored_home_answers_and_learns_as_before(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        ids = [turn.id for turn in runtime.user("ada").turns()]
        before = greedy(runtime.user("ada"))
    shutil.rmtree(home)
    report = personalpeft.restore(tmp_path / "copies", home)
    assert (report.home, report.replaced, report.forgotten) == (home, None, 0)
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        assert runtime.verify() == ()
        assert [turn.id for turn in ada.turns()] == ids
        assert greedy(ada) == before
        correct(ada, 3, first=10)
        assert ada.learn().revision


def test_a_home_is_no_folder_for_its_own_backups(home: Path) -> None:
    with open_runtime(home) as runtime:
        with pytest.raises(InvalidInput, match="the home itself"):
            runtime.maintenance.back_up(home)
        runtime.maintenance.back_up(home / "backups")


@pytest.mark.parametrize("loss", ["whole home", "database", "nothing"])
def test_what_was_forgotten_since_the_backup_stays_forgotten(
    home: Path, tmp_path: Path, loss: str
) -> None:
    with open_runtime(home) as runtime:
        fact = runtime.user("ada").signals()[-1].id
        runtime.user("ada").forget(fact)
        runtime.forget_user("bo")
    if loss == "whole home":
        shutil.rmtree(home)
    elif loss == "database":
        (home / "personalpeft.db").write_bytes(b"damaged" * 500)
    report = personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert report.forgotten == 2
    with open_runtime(home) as runtime:
        assert [user.id for user in runtime.users()] == ["ada"]
        with pytest.raises(Forgotten):
            runtime.user("ada").forget(fact)
        assert runtime.user("ada").layers()[0].head
    assert not any(
        SECRET.encode() in path.read_bytes() for path in home.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("loss", ["whole home", "nothing"])
def test_earlier_wordings_that_were_forgotten_with_a_later_one_stay_forgotten(
    home: Path, tmp_path: Path, loss: str
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        (fact,) = ada.items()
        turn = ask(ada, "Who has the key?")
        first = ada.feedback(turn, edit="Zanzibar has the first key.")
        runtime.maintenance.back_up(tmp_path / "copies")
        changed = ada.edit_item(fact.id, "My locker code is 4712.").id
        second = ada.feedback(turn, edit="Zanzibar has the second key.")
        erased = {*ada.forget(changed).signals, *ada.forget(second).signals}
        assert {fact.id, first} < erased
    if loss == "whole home":
        shutil.rmtree(home)
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    with open_runtime(home) as runtime:
        ids = {each.id for each in runtime.user("ada").signals(current=False)}
        assert not ids & erased
    files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    assert not any(word in data for data in files for word in (SECRET.encode(), b"Zanzibar"))


@pytest.mark.parametrize("loss", ["whole home", "nothing"])
def test_restored_home_knows_where_its_backups_lie(home: Path, tmp_path: Path, loss: str) -> None:
    copies, others = tmp_path / "copies", tmp_path / "others"
    with open_runtime(home) as runtime:
        runtime.maintenance.back_up(others)
    if loss == "whole home":
        shutil.rmtree(home)
    personalpeft.restore(copies, home, replace=True)
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        certificate = ada.forget(ada.signals()[-1].id, certificate=True).certificate
        assert certificate is not None
        listed = {each["folder"] for each in certificate.statement["remains"]["backups"]}
    assert listed == {str(copies), *([str(others)] if loss == "nothing" else [])}
    shutil.rmtree(home)
    for former in tmp_path.glob("home.replaced-*"):
        shutil.rmtree(former)
    assert personalpeft.restore(copies, home).forgotten == 1


def test_user_and_layer_without_any_turn_stay_forgotten(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        peft = runtime.user("ada").export_peft(tmp_path / "peft", layer="style")
        runtime.user("cy").import_peft(peft)
        runtime.user("dee").import_peft(peft, layer="skill.email")
        runtime.user("eve")
        runtime.maintenance.back_up(tmp_path / "copies")
        ask(runtime.user("eve"))
        runtime.user("dee").forget("skill.email")
        for user in ("cy", "eve"):
            runtime.forget_user(user)
    assert personalpeft.restore(tmp_path / "copies", home, replace=True).forgotten == 3
    with open_runtime(home) as runtime:
        assert [user.id for user in runtime.users()] == ["ada", "bo", "dee"]
        assert runtime.user("dee").layers() == ()


def test_user_who_was_made_or_imported_anew_after_the_forgetting_is_kept(
    home: Path, tmp_path: Path
) -> None:
    with open_runtime(home) as runtime:
        runtime.user("ada").export(tmp_path / "ada.personal")
        for user in ("ada", "bo"):
            runtime.forget_user(user)
        runtime.import_user(tmp_path / "ada.personal")
        turn = ask(runtime.user("bo")).turn_id
        runtime.maintenance.back_up(tmp_path / "copies")
    assert personalpeft.restore(tmp_path / "copies", home, replace=True).forgotten == 0
    with open_runtime(home) as runtime:
        assert runtime.user("ada").stack().entries
        assert [each.id for each in runtime.user("bo").turns()] == [turn]


def test_what_one_of_two_users_with_the_same_turns_forgot_is_forgotten_of_that_one_alone(
    home: Path, tmp_path: Path
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        ada.export(tmp_path / "ada.personal")
        for user in ("ad", "zoe"):
            runtime.import_user(tmp_path / "ada.personal", as_user=user)
        runtime.maintenance.back_up(tmp_path / "copies")
        secret = ada.signals()[-1].id
        ada.forget(secret)
        runtime.forget_user("ad")
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    with open_runtime(home) as runtime:
        assert [user.id for user in runtime.users()] == ["ada", "bo", "zoe"]
        assert secret in [each.id for each in runtime.user("zoe").signals()]
        with pytest.raises(Forgotten):
            runtime.user("ada").forget(secret)


def test_log_of_an_earlier_version_still_counts(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        fact = runtime.user("ada").signals()[-1].id
        turn = runtime.user("bo").turns()[-1].id
    lines = [{"item": fact}, {"user": turn}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "copies" / "forgotten.jsonl").write_text(text)
    assert personalpeft.restore(tmp_path / "copies", home, replace=True).forgotten == 2
    with open_runtime(home) as runtime:
        assert [user.id for user in runtime.users()] == ["ada"]
        assert fact not in [each.id for each in runtime.user("ada").signals()]


def test_what_was_forgotten_is_found_in_the_log_of_another_folder(
    home: Path, tmp_path: Path
) -> None:
    with open_runtime(home) as runtime:
        runtime.user("ada").forget(runtime.user("ada").signals()[-1].id)
    kept = tmp_path / "kept"
    kept.mkdir()
    shutil.move(home / "forgotten.jsonl", kept)
    (tmp_path / "copies" / "forgotten.jsonl").unlink()
    shutil.rmtree(home)
    report = personalpeft.restore(tmp_path / "copies", home, forgotten_in=[kept])
    assert report.forgotten == 1


def test_what_was_forgotten_is_found_in_a_newer_database(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        runtime.user("ada").forget(runtime.user("ada").signals()[-1].id)
    (tmp_path / "kept").mkdir()
    shutil.move(home / "personalpeft.db", tmp_path / "kept")
    (tmp_path / "copies" / "forgotten.jsonl").unlink()
    shutil.rmtree(home)
    report = personalpeft.restore(tmp_path / "copies", home, forgotten_in=[tmp_path / "kept"])
    assert report.forgotten == 1


@pytest.mark.parametrize("fault", ["damaged", "no key"])
def test_database_that_is_to_say_what_was_forgotten_and_cannot_be_opened_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    newest = tmp_path / "newest"
    newest.mkdir()
    (newest / "personalpeft.db").write_bytes(b"damaged" * 500)
    if fault == "no key":
        pytest.importorskip("sqlcipher3")
        monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "keys"))
        personalpeft.encrypt(home, "file")
        for name in ("personalpeft.db", "encryption.json"):
            shutil.copy(home / name, newest)
        monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "others"))
    shutil.rmtree(home)
    with pytest.raises(Damaged if fault == "damaged" else HomeError, match="newest"):
        personalpeft.restore(tmp_path / "copies", home, forgotten_in=[newest])
    assert not home.exists()


def test_damaged_lines_of_the_log_are_counted(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        for signal in runtime.user("ada").signals()[-2:]:
            runtime.user("ada").forget(signal.id)
    shutil.rmtree(home)
    log = tmp_path / "copies" / "forgotten.jsonl"
    log.write_bytes(b"#" + log.read_bytes()[1:] + b'{"item": "torn')
    report = personalpeft.restore(tmp_path / "copies", home)
    assert (report.forgotten, report.unreadable) == (1, 1)
    assert "--forgotten-in" in str(report)


def test_log_of_forgotten_items_has_no_words_and_no_user_and_survives_a_torn_line(
    home: Path, tmp_path: Path
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        first, second = (ada.remember(f"{SECRET} {number}") for number in range(2))
        ada.forget(first)
        for log in (home / "forgotten.jsonl", tmp_path / "copies" / "forgotten.jsonl"):
            with log.open("ab") as file:
                file.write(b'{"item": "s_0')
        ada.forget(second)
        runtime.forget_user("bo")
        runtime.maintenance.back_up(tmp_path / "copies")
    for folder in (home, tmp_path / "copies"):
        lines = (folder / "forgotten.jsonl").read_bytes().splitlines()
        assert len(lines) == 4
        ids = rb'"(item|user)": "u_[0-9a-f]{32}(/s_[0-9a-z]{26})?"'
        assert sum(re.fullmatch(rb"\{%s\}" % ids, line) is not None for line in lines) == 3


def test_adapter_that_no_revision_of_the_copy_names_is_left_out(home: Path, tmp_path: Path) -> None:
    # A replica's files may be newer or older than its database.
    (copy,) = (each for each in (tmp_path / "copies").iterdir() if each.is_dir())
    digest = hashlib.sha256(b"weights").hexdigest()
    stray = copy / "blobs" / digest[:2] / digest
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"weights")
    # Systems write files into the folders that they show, and beside files that they copy.
    for name in (".DS_Store", f"._{digest}", "Thumbs.db"):
        stray.with_name(name).write_bytes(b"not ours")
    (copy / "._personalpeft.db").write_bytes(b"not ours")
    personalpeft.restore(copy, home, replace=True)
    assert not [path for path in home.rglob("*") if _content(path) == b"not ours"]
    assert not list(home.rglob(digest))
    with open_runtime(home) as runtime:
        assert runtime.verify() == ()


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_former_home_is_kept_and_replaced_only_on_request(home: Path, tmp_path: Path) -> None:
    contents = home_contents(home)
    with pytest.raises(InvalidInput):
        personalpeft.restore(tmp_path / "copies", home)
    assert home_contents(home) == contents
    report = personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert report.replaced is not None
    assert home_contents(report.replaced) == contents


@pytest.mark.parametrize("mode", ["wal", "truncate"])
def test_home_that_a_program_has_open_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    # Where SQLite is older a home has no WAL.
    monkeypatch.setattr(database, "JOURNAL_MODE", mode)
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        ada.remember(SECRET)
        runtime.maintenance.back_up(tmp_path / "copies")
        with pytest.raises(Busy):
            personalpeft.restore(tmp_path / "copies", home, replace=True)
        fact = ada.remember("The program goes on with its home.")
    with open_runtime(home) as runtime:
        assert fact in {item.id for item in runtime.user("ada").items()}
    assert personalpeft.restore(tmp_path / "copies", home, replace=True).replaced


def test_damaged_backup_and_busy_home_change_nothing(home: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        personalpeft.restore(tmp_path / "none", home, replace=True)
    (copy,) = (each for each in (tmp_path / "copies").iterdir() if each.is_dir())
    with open_runtime(home) as runtime:
        contents = home_contents(home)
        with runtime.user("ada")._services.store.database.write_lock(), pytest.raises(Busy):
            personalpeft.restore(copy, home, replace=True)
    with closing(sqlite3.connect(copy / "personalpeft.db")) as db, db:
        db.execute("update turn set reply = 'changed' where rowid = 1")
    with pytest.raises(Damaged):
        personalpeft.restore(copy, home, replace=True)
    assert home_contents(home) == contents
    # A copy may have what was forgotten since.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copies", "home"]


def test_backup_whose_database_is_empty_is_not_restored(home: Path, tmp_path: Path) -> None:
    with open_runtime(home) as runtime:
        correct(runtime.user("ada"), 1, first=10)
        runtime.maintenance.back_up(tmp_path / "copies")
    newest = sorted(each for each in (tmp_path / "copies").iterdir() if each.is_dir())[-1]
    (newest / "personalpeft.db").write_bytes(b"")
    with pytest.raises(Damaged) as error:
        personalpeft.restore(tmp_path / "copies", tmp_path / "new")
    assert str(newest) in error.value.message
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_home_behind_a_link_is_replaced_where_it_lies(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(home)
    report = personalpeft.restore(tmp_path / "copies", link, replace=True)
    assert link.is_symlink()
    assert report.home == home
    assert report.replaced is not None
    assert not report.replaced.is_symlink()
    with open_runtime(link) as runtime:
        assert runtime.user("ada").turns()


@pytest.mark.parametrize(
    "loss",
    ["missing in the home", pytest.param("damaged in the copy", marks=pytest.mark.exhaustive)],
)
def test_backup_with_a_lost_adapter_is_restored_and_the_adapter_built_again(
    home: Path, tmp_path: Path, loss: str
) -> None:
    with open_runtime(home) as runtime:
        before = greedy(runtime.user("ada"))
    blob = next(home.glob("blobs/*/*"))
    if loss == "missing in the home":
        blob.unlink()
        with open_runtime(home) as runtime:
            copy = runtime.maintenance.back_up(tmp_path / "others").path
    else:
        (copy,) = (each for each in (tmp_path / "copies").iterdir() if each.is_dir())
        (copy / blob.relative_to(home)).write_bytes(b"no adapter")
    shutil.rmtree(home)
    report = personalpeft.restore(copy, home)
    assert report.missing == (blob.name,)
    assert "verify --repair" in str(report)
    with open_runtime(home) as runtime:
        assert len(list(runtime.users())) == 2
        runtime.repair()
        assert runtime.verify() == ()
        assert greedy(runtime.user("ada")) == before


def test_log_that_cannot_be_read_or_is_not_there_keeps_forgotten_items_from_coming_back(
    home: Path, tmp_path: Path
) -> None:
    contents = home_contents(home)
    with pytest.raises(NotFound):
        personalpeft.restore(tmp_path / "copies", home, replace=True, forgotten_in=[tmp_path])
    (tmp_path / "copies" / "forgotten.jsonl").mkdir()
    with pytest.raises(HomeError):
        personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert home_contents(home) == contents


def test_home_comes_back_where_the_copy_cannot_take_its_place(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents, replace = home_contents(home), file_system.replace

    def fail(source: Path, target: Path) -> None:
        if target == home and "replaced" not in source.name:
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(file_system, "replace", fail)
    with pytest.raises(HomeError):
        personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert home_contents(home) == contents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copies", "home"]


@pytest.mark.parametrize("is_empty", [True, False])
def test_home_that_is_a_mount_point_is_refused_before_anything_is_copied(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_empty: bool
) -> None:
    target = tmp_path / "volume" if is_empty else home
    target.mkdir(exist_ok=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    monkeypatch.setattr(shutil, "copyfileobj", None)
    with pytest.raises(InvalidInput, match="volume") as caught:
        personalpeft.restore(tmp_path / "copies", target, replace=True)
    assert str(target / "home") in caught.value.hint
    assert not list(tmp_path.glob("*.restoring"))


def test_restore_needs_no_base(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_runtime(home) as runtime:
        runtime.forget_user("bo")
        runtime.user("ada").forget(runtime.user("ada").signals()[-1].id)
    monkeypatch.setenv("PERSONALPEFT_BASE", "gone")
    assert personalpeft.restore(tmp_path / "copies", home, "/gone", replace=True).forgotten == 2


def test_certificate_names_what_restores_left(home: Path, tmp_path: Path) -> None:
    home = home.rename(tmp_path / "home [1]")
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    left = [tmp_path / f"{home.name}.{each}" for each in ("replaced-1", "restored-2", "restoring")]
    for folder in left[1:]:
        folder.mkdir()
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        certificate = ada.forget(ada.signals()[-1].id, certificate=True).certificate
        assert certificate is not None
        assert certificate.statement["remains"]["former_homes"] == [str(path) for path in left]


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_restore_that_was_killed_between_its_renames_is_finished_by_the_next_opening(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    replace = file_system.replace

    def die(source: Path, target: Path) -> None:
        if target == home:
            raise KeyboardInterrupt
        replace(source, target)

    with open_runtime(home) as runtime:
        runtime.forget_user("bo")
    with monkeypatch.context() as patched:
        patched.setattr(file_system, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert not home.exists()
    if left == "an empty folder":
        home.mkdir()
    with pytest.raises(HomeError, match="was being restored"):
        personalpeft.open(home, backend="fake", read_only=True)
    with open_runtime(home) as runtime:
        assert [user.id for user in runtime.users()] == ["ada"]
    report = personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert report.replaced is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "copies",
        "home",
        "home.replaced-1",
        "home.replaced-2",
    ]


def test_restored_folder_whose_home_was_never_moved_aside_is_not_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = file_system.replace

    def die(source: Path, target: Path) -> None:
        if source == home:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(file_system, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            personalpeft.restore(tmp_path / "copies", home, replace=True)
    with open_runtime(home) as runtime:
        runtime.forget_user("bo")
    shutil.rmtree(home)
    with open_runtime(home) as runtime:
        assert list(runtime.users()) == []
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert not any("restored" in path.name for path in tmp_path.iterdir())


def test_backups_inside_the_home_stay_in_it(home: Path) -> None:
    with open_runtime(home) as runtime:
        copies = [runtime.maintenance.back_up(home / "backups").path for _ in range(2)]
    report = personalpeft.restore(copies[0], home, replace=True)
    assert report.backup == copies[0]
    assert all(copy.is_dir() for copy in copies)
    with open_runtime(home) as runtime:
        assert len(list(runtime.users())) == 2
        third = runtime.maintenance.back_up(home / "backups").path
        assert third.name.startswith("copy-000003")
