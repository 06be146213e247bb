"""What plugins keep in a home is in its backups, and is encrypted with it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from runtime_makers import open_runtime

import personalpeft
from personalpeft import Busy, HomeError, Runtime

WORD = "Quetzalcoatl"


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "keys"))


def add(runtime: Runtime, text: str) -> str:
    """Add a file of the plugin, and a row that names it."""
    data = runtime.plugin_data("parrots")
    digest = data.put_file(text.encode())
    with closing(data.connect()) as db:
        db.execute("create table if not exists parrot (file text, name text)")
        db.execute("insert into parrot values (?, ?)", [digest, text])
    return digest


def contents(home: Path) -> dict[str, str]:
    """Return the texts of the plugin's rows; each is that of its file."""
    with open_runtime(home) as runtime:
        data = runtime.plugin_data("parrots")
        with closing(data.connect()) as db:
            rows = db.execute("select file, name from parrot").fetchall()
        for file, name in rows:
            assert data.read_file(file) == name.encode()
    return dict(rows)


def holds_word(folder: Path) -> bool:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return any(WORD.encode() in path.read_bytes() for path in files)


def test_backup_of_data_in_use_has_its_rows_and_files(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        first = add(runtime, WORD)
        with closing(runtime.plugin_data("parrots").connect()) as db:
            db.execute("pragma journal_mode=wal").fetchall()
            runtime.maintenance.back_up(tmp_path / "copies")
            second = add(runtime, "another")
            copy = runtime.maintenance.back_up(tmp_path / "copies").path
        add(runtime, "too late")
    (shared,) = copy.rglob(first)
    assert shared.stat().st_nlink == 2
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert contents(home) == {first: WORD, second: "another"}


def test_file_that_is_damaged_or_deleted_is_missing(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        data = runtime.plugin_data("parrots")
        damaged, deleted = data.put_file(b"one"), data.put_file(b"two")
        (data.files / damaged).write_bytes(b"three")
        data.delete_file(deleted)
        assert data.read_file(damaged) is None
        assert data.read_file(deleted) is None
        data.put_file(b"one")
        assert data.read_file(damaged) == b"one"


def test_data_is_encrypted_with_its_home_and_in_its_backups(tmp_path: Path) -> None:
    pytest.importorskip("sqlcipher3")
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        kept = {add(runtime, WORD): WORD}
    assert holds_word(home)
    personalpeft.encrypt(home, "file")
    assert not holds_word(home)
    assert contents(home) == kept
    with open_runtime(home) as runtime:
        kept[add(runtime, f"{WORD} 2")] = f"{WORD} 2"
        runtime.maintenance.back_up(tmp_path / "copies")
    personalpeft.encrypt(home, rotate=True)
    assert contents(home) == kept
    personalpeft.restore(tmp_path / "copies", home, replace=True)
    assert not holds_word(tmp_path)
    assert contents(home) == kept
    personalpeft.decrypt(home)
    assert contents(home) == kept
    assert holds_word(home)


def test_plain_data_in_an_encrypted_home_is_refused_until_it_is_encrypted(tmp_path: Path) -> None:
    pytest.importorskip("sqlcipher3")
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        runtime.user("ada")
    personalpeft.encrypt(home, "file")
    with open_runtime(home) as runtime:
        data = runtime.plugin_data("parrots")
        data.create()
        with closing(sqlite3.connect(data.folder / "data.sqlite3")) as db, db:
            db.execute("create table parrot (file text, name text)")
            db.execute("insert into parrot values (?, ?)", [data.put_file(WORD.encode()), WORD])
        with pytest.raises(HomeError, match="before it was encrypted") as refused:
            data.connect()
        assert "--rotate" in refused.value.hint
        runtime.maintenance.back_up(tmp_path / "copies")
    personalpeft.encrypt(home, rotate=True)
    assert list(contents(home).values()) == [WORD]
    assert not holds_word(home)


def test_encryption_is_refused_while_a_plugin_has_its_data_open(tmp_path: Path) -> None:
    pytest.importorskip("sqlcipher3")
    home = tmp_path / "home"
    with open_runtime(home) as runtime:
        add(runtime, WORD)
        db = runtime.plugin_data("parrots").connect()
        for sql in ("pragma journal_mode=wal", "select * from parrot"):
            db.execute(sql).fetchall()
    with closing(db), pytest.raises(Busy):
        personalpeft.encrypt(home, "file")
    assert list(contents(home).values()) == [WORD]
    assert not list(home.glob(".convert*"))
