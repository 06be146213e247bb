"""An encrypted home behaves as a plain one, and shows nothing to those who lack its key."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, greedy, open_runtime

import personalpeft
from personalpeft import Busy, HomeError, InvalidInput
from personalpeft.store import database
from personalpeft.store.home_keys import ENCRYPTION

pytest.importorskip("sqlcipher3")
pytest.importorskip("cryptography")

WORD = "Quetzalcoatl"
FACT = f"My parrot is called {WORD}."


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of key files."""
    monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "keys"))
    monkeypatch.delenv("PERSONALPEFT_PASSPHRASE", raising=False)
    return tmp_path / "keys"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain home with a live layer, a fact, a note and keys of certificates."""
    home = tmp_path_factory.mktemp("template") / "home"
    with open_runtime(home) as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        correct(ada, 6)
        ada.feedback(ask(ada, f"Who is {WORD}?"), edit=f"{WORD} is a parrot.")
        assert ada.learn().revision
        ada.remember(FACT)
        ask(bo, "I am Bo.")
        runtime.maintenance.write_note("daemon", WORD)
        ada.forget(ada.remember("My code is 4711."), certificate=True)
        data = runtime.plugin_data("parrots")
        digest = data.put_file(WORD.encode())
        with closing(data.connect()) as db:
            db.execute("create table parrot (file text, name text)")
            db.execute("insert into parrot values (?, ?)", [digest, WORD])
    return home


@pytest.fixture
def plain(template: Path, tmp_path: Path) -> Path:
    """A copy of the plain home."""
    return shutil.copytree(template, tmp_path / "home")


@pytest.fixture
def home(plain: Path) -> Path:
    """The same home, encrypted with a key in a file."""
    personalpeft.encrypt(plain, "file")
    return plain


def files_with(folder: Path, words: str) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and words.encode() in path.read_bytes()
    ]


def replies(home: Path) -> list[str]:
    with open_runtime(home) as runtime:
        return greedy(runtime.user("ada", create=False))


def test_encrypting_changes_no_reply_and_leaves_no_words(plain: Path) -> None:
    before = replies(plain)
    with open_runtime(plain) as runtime:
        copy = runtime.maintenance.back_up(plain / "backups").path
    adapters = [path.read_bytes() for path in plain.glob("blobs/*/*")]
    assert files_with(plain, WORD)
    report = personalpeft.encrypt(plain, "file")
    assert report.source == "file"
    # Never deleted, but named.
    assert report.plain_copies == (copy,)
    shutil.rmtree(copy)
    assert files_with(plain, WORD) == []
    assert not any(path.read_bytes() in adapters for path in plain.rglob("*") if path.is_file())
    assert replies(plain) == before
    with open_runtime(plain) as runtime:
        assert runtime.verify() == ()
        assert runtime.maintenance.read_note("daemon") == WORD
        assert any(signal.payload.get("text") == FACT for signal in runtime.user("ada").signals())


def test_encrypted_home_learns_rolls_back_exports_and_imports(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "ada.personal"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        first = ada.layers()[0].head
        correct(ada, 4, first=10)
        second = ada.learn().revision
        assert second != first
        ada.rollback(ada.layers()[0].name, to=first)
        assert ada.layers()[0].head == first
        ada.export(file)
        runtime.import_user(file, as_user="cleo")
        assert greedy(runtime.user("cleo")) == greedy(ada)
        # They share adapters. What is left of one is whole when the other is gone.
        runtime.forget_user("ada")
        assert runtime.verify() == ()
        assert greedy(runtime.user("cleo"))
    assert files_with(home, WORD) == []


def test_checkpoints_are_encrypted(home: Path) -> None:
    with open_runtime(home) as runtime:
        store = runtime._services.store
        store.save_checkpoint("ada", "style", WORD.encode())
        assert store.load_checkpoint("ada", "style") == WORD.encode()
        assert files_with(home, WORD) == []


def test_forgetting_a_user_destroys_the_users_key(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "blobs", tmp_path / "blobs")
    with open_runtime(home) as runtime:
        certificate = runtime.forget_user("ada", certificate=True).certificate
        assert certificate is not None
        (key,) = certificate.statement["keys_destroyed"]
        assert len(key) == 32
        cipher = runtime._services.store.cipher
        blobs = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
        assert blobs
        # With the home's key and a copy of the files from before.
        assert not any(cipher.recipients(path.read_bytes()) for path in blobs)


@pytest.mark.parametrize("what", ["signal", "conversation", "layer"])
def test_old_copy_of_a_forgotten_adapter_opens_no_more(
    home: Path, tmp_path: Path, what: str
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        kept, learned = ada.stack().entries[0].digest, correct(ada, 4, first=10)
        assert ada.learn().revision
        erased = ada.stack().entries[0].digest
        shutil.copytree(home / "blobs", tmp_path / "blobs")
        store = runtime._services.store
        former = store.cipher.user_key_ids("ada")
        turn = ada.signals()[-1].turn
        item = {"signal": learned[0], "conversation": turn, "layer": "style"}[what]
        assert item is not None
        report = ada.forget(
            item,
            conversation=what == "conversation",
            rebuild=what == "signal",
            certificate=True,
        )
        assert report.certificate is not None
        assert report.certificate.statement["keys_destroyed"] == former
        assert former[0] in report.certificate.to_markdown()
        # With the home's key and a copy of the files from before.
        blobs = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
        assert len(blobs) >= 2
        assert not any(store.cipher.recipients(path.read_bytes()) for path in blobs)
        assert not store.blobs.exists(erased)
        # What stays is readable, and so is what was built with the new key.
        assert store.blobs.exists(kept) is (what != "layer")
        assert runtime.verify() == ()


def test_forgetting_what_was_never_learned_destroys_no_key(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        keys = runtime._services.store.cipher.user_key_ids("ada")
        report = ada.forget(ada.remember("Nothing."), certificate=True)
        assert report.certificate is not None
        assert report.certificate.statement["keys_destroyed"] == []
        assert runtime._services.store.cipher.user_key_ids("ada") == keys


def test_users_who_share_an_adapter_forget_it_one_after_the_other(
    home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ada.personal"
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        ada.export(file)
        runtime.import_user(file, as_user="cleo")
        cleo = runtime.user("cleo")
        before = greedy(cleo)
        shutil.copytree(home / "blobs", tmp_path / "blobs")
        ada.forget("style")
        assert greedy(cleo) == before
        cleo.forget("style")
        cipher = runtime._services.store.cipher
        blobs = [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
        assert blobs
        assert not any(cipher.recipients(path.read_bytes()) for path in blobs)


def test_backup_beside_a_forget_has_the_keys_of_its_files(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        (item, *_) = correct(ada, 4, first=10)
        ada.learn()
        copy_file, forgotten = os.link, []

        def forget_first(*args: Any, **more: Any) -> None:
            if not forgotten:
                forgotten.append(item)
                ada.forget(item, rebuild=False)
            copy_file(*args, **more)

        copies = tmp_path / "copies"
        runtime.maintenance.back_up(copies)
        monkeypatch.setattr(os, "link", forget_first)
        assert runtime.maintenance.back_up(copies).missing == ()
        assert forgotten
    assert personalpeft.restore(copies, tmp_path / "restored").forgotten == 0
    with open_runtime(tmp_path / "restored") as restored:
        assert restored.verify() == ()


def test_adapter_of_two_users_survives_a_restore_after_one_of_them_forgot(
    home: Path, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    with open_runtime(home) as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        peft = ada.export_peft(tmp_path / "peft", layer="style")
        for user in (ada, bo):
            user.import_peft(peft, layer="skill.email")
        runtime.maintenance.back_up(copies)
        # It destroys the key of ada, which opens the file of the first copy.
        assert ada.forget("style").revisions
        runtime.maintenance.back_up(copies)
    personalpeft.restore(copies, home, replace=True)
    with open_runtime(home) as runtime:
        runtime.forget_user("bo")
        assert runtime.verify() == ()


def test_backup_is_encrypted_and_restores(home: Path, tmp_path: Path) -> None:
    copies, before = tmp_path / "copies", replies(home)
    with open_runtime(home) as runtime:
        runtime.maintenance.back_up(copies)
        runtime.maintenance.back_up(copies)
        fact = next(s.id for s in runtime.user("ada").signals() if s.payload.get("text") == FACT)
        runtime.user("ada").forget(fact, rebuild=False)
    assert files_with(copies, WORD) == []
    report = personalpeft.restore(copies, home, replace=True)
    assert (report.forgotten, report.lost_encryption) == (1, False)
    assert (home / ENCRYPTION).is_file()
    assert replies(home) == before
    shutil.rmtree(home)
    assert personalpeft.restore(copies, home).forgotten == 1


def test_rotation_makes_the_former_key_useless_for_the_home_and_keeps_backups(
    home: Path, tmp_path: Path, keys: Path
) -> None:
    copies, before = tmp_path / "copies", replies(home)
    with open_runtime(home) as runtime:
        runtime.maintenance.back_up(copies)
    (former,) = keys.iterdir()
    report = personalpeft.encrypt(home, rotate=True)
    assert report.former_key == str(former)
    new = Path(report.key or "")
    assert replies(home) == before
    with open_runtime(home) as runtime:
        assert runtime.maintenance.back_up(copies).missing == ()
    assert personalpeft.restore(copies, tmp_path / "newest").forgotten == 0
    new.rename(tmp_path / "elsewhere")
    with pytest.raises(HomeError, match="key is not here"):
        replies(home)
    new.write_text("no key")
    with pytest.raises(HomeError, match="key is damaged"):
        replies(home)
    # The oldest backup needs the former key alone.
    assert personalpeft.restore(min(copies.glob("copy-*")), tmp_path / "oldest").home.is_dir()


def test_decrypting_gives_the_plain_home_back(home: Path) -> None:
    before = replies(home)
    report = personalpeft.decrypt(home)
    assert report.source is None
    assert not (home / ENCRYPTION).exists()
    assert files_with(home, WORD)
    assert replies(home) == before
    with open_runtime(home) as runtime:
        assert runtime.verify() == ()
        assert runtime.maintenance.read_note("daemon") == WORD


def test_copied_home_opens_nothing_without_its_key(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(home, tmp_path / "stolen")
    monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "nothing"))
    for open_it in (
        lambda: personalpeft.open(copy, backend="fake"),
        lambda: personalpeft.open(copy, backend="fake", read_only=True),
        lambda: personalpeft.decrypt(copy),
        lambda: personalpeft.encrypt(copy, "file", rotate=True),
    ):
        with pytest.raises(HomeError, match="its key is not here"):
            open_it()
    # Without the file that says so, it is no home either.
    (copy / ENCRYPTION).unlink()
    with pytest.raises(HomeError):
        personalpeft.open(copy, backend="fake")


def test_copied_home_has_no_key_of_the_running_server(plain: Path) -> None:
    with open_runtime(plain) as runtime:
        runtime.api_keys.ensure_admin_key()
        secret = runtime.api_keys.admin_key_file.read_text("utf-8").strip()
    personalpeft.encrypt(plain, "file")
    assert files_with(plain, secret) == []
    with open_runtime(plain) as runtime:
        assert not runtime.api_keys.ensure_admin_key()
        # Its clients go on.
        (key,) = runtime.api_keys.list_keys()
        assert key.is_admin
        assert runtime.api_keys.authenticate(secret) == key
        runtime.api_keys.revoke(key.id)
        assert runtime.api_keys.authenticate(secret) is None


def test_home_that_an_earlier_version_encrypted_loses_its_admin_key_file(home: Path) -> None:
    (home / "token").write_text("pp_of_an_earlier_version\n", "utf-8")
    (home / "token").chmod(0o600)
    with open_runtime(home) as runtime:
        assert files_with(home, "pp_of_an_earlier_version") == []
        found = runtime.api_keys.authenticate("pp_of_an_earlier_version")
        assert found is not None
        assert found.is_admin


def test_wrong_passphrase_is_refused_and_changes_nothing(plain: Path) -> None:
    personalpeft.encrypt(plain, "passphrase", passphrase="correct horse")
    with pytest.raises(HomeError, match="is encrypted with a passphrase"):
        personalpeft.open(plain, backend="fake")
    personalpeft.encrypt(plain, rotate=True, passphrase="correct horse", new_passphrase="new one")
    files = {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()}
    with pytest.raises(HomeError, match="The passphrase does not open the home"):
        personalpeft.open(plain, backend="fake", passphrase="correct horse")
    assert {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()} == files
    with personalpeft.open(plain, backend="fake", passphrase="new one") as runtime:
        assert runtime.verify() == ()


def test_passphrase_that_would_not_protect_a_home_is_refused(plain: Path, tmp_path: Path) -> None:
    def refused(home: Path) -> None:
        with pytest.raises(InvalidInput):
            personalpeft.open(home, backend="fake", passphrase="correct horse")

    refused(plain)
    refused(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    personalpeft.encrypt(plain, "file")
    refused(plain)


def test_machine_without_a_keyring_uses_a_file_that_only_its_owner_reads(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring = pytest.importorskip("keyring")
    from keyring.backends import fail

    present = keyring.get_keyring()
    keyring.set_keyring(fail.Keyring())
    try:
        report = personalpeft.encrypt(tmp_path / "new")
        assert report.source == "file"
        with pytest.raises(InvalidInput, match="no keyring"):
            personalpeft.encrypt(tmp_path / "other", "keyring")
    finally:
        keyring.set_keyring(present)
    (file,) = keys.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with open_runtime(tmp_path / "new") as runtime:
        runtime.user("ada").remember(FACT)
    assert files_with(tmp_path, WORD) == []


def test_key_in_the_keyring_opens_the_home_and_stands_in_no_file(
    plain: Path, tmp_path: Path
) -> None:
    keyring = pytest.importorskip("keyring")
    from keyring.backend import KeyringBackend

    # Before the class, which would be the best of all that are known.
    present = keyring.get_keyring()

    class InMemory(KeyringBackend):
        priority = 5
        kept: dict[tuple[str, str], str] = {}  # noqa: RUF012

        def get_password(self, service: str, username: str) -> str | None:
            return self.kept.get((service, username))

        def set_password(self, service: str, username: str, password: str) -> None:
            self.kept[service, username] = password

    keyring.set_keyring(InMemory())
    try:
        assert personalpeft.encrypt(plain).source == "keyring"
        assert replies(plain)
    finally:
        keyring.set_keyring(present)
    (key,) = InMemory.kept.values()
    assert files_with(tmp_path, key) == []
    with pytest.raises(HomeError, match="its key is not here"):
        replies(plain)


@pytest.mark.parametrize("mode", ["wal", "truncate"])
def test_home_in_use_is_not_encrypted(
    template: Path, tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    plain = shutil.copytree(template, tmp_path / "home")
    # Where SQLite is older it leaves the WAL.
    monkeypatch.setattr(database, "JOURNAL_MODE", mode)
    with open_runtime(plain) as runtime:
        before = runtime.user("ada").turns()
        with pytest.raises(Busy):
            personalpeft.encrypt(plain, "file")
        assert runtime.user("ada").turns() == before
    assert not (plain / ENCRYPTION).exists()
    assert not any(keys.iterdir())


def test_encrypting_twice_or_rotating_a_plain_home_is_refused(plain: Path) -> None:
    with pytest.raises(InvalidInput):
        personalpeft.encrypt(plain, "file", rotate=True)
    with pytest.raises(InvalidInput):
        personalpeft.decrypt(plain)
    with pytest.raises(InvalidInput):
        personalpeft.decrypt(plain.parent / "missing")
    assert not (plain.parent / "missing").exists()
    with pytest.raises(InvalidInput):
        personalpeft.encrypt(plain, "paper")
    personalpeft.encrypt(plain, "file")
    with pytest.raises(InvalidInput):
        personalpeft.encrypt(plain, "file")


def test_damaged_or_exchanged_files_are_found(home: Path) -> None:
    first, *_ = (path for path in sorted(home.glob("blobs/*/*")) if path.is_file())
    stored = bytearray(first.read_bytes())
    stored[-1] ^= 1
    first.write_bytes(bytes(stored))
    with open_runtime(home) as runtime:
        (problem,) = runtime.verify()
        assert "does not match its digest" in problem.fault


def _killed(point: int, work: Callable[..., object], *arguments: Any, **more: Any) -> bool:
    """Work in a child that ends at its n-th sync, rename or deletion; return whether it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    calls = itertools.count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def die_or_call(*args: Any, **more: Any) -> Any:
            if next(calls) == point:
                os._exit(9)
            return call(*args, **more)

        return die_or_call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, dying(getattr(os, name)))
    try:
        work(*arguments, **more)
    except BaseException:  # noqa: BLE001
        os._exit(3)
    os._exit(0)


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends a forked process")
@pytest.mark.parametrize(("rotate", "step"), [(False, 12), (False, 1), (True, 1)])
def test_kill_while_encrypting_loses_nothing(
    plain: Path, tmp_path: Path, rotate: bool, step: int
) -> None:
    if rotate:
        personalpeft.encrypt(plain, "file")
    before = replies(plain)
    seen = set()
    for point in itertools.count(0, step):
        copy = shutil.copytree(plain, tmp_path / f"killed-{point}")
        was_killed = _killed(point, personalpeft.encrypt, copy, "file", rotate=rotate)
        is_decided = (copy / ".converted").exists() or (copy / ".converted-moving").exists()
        if is_decided:
            with pytest.raises(HomeError, match="was being changed"):
                personalpeft.open(copy, backend="fake", read_only=True)
        assert replies(copy) == before
        with open_runtime(copy) as runtime:
            assert runtime.verify() == ()
        assert not list(copy.glob(".convert*"))
        is_encrypted = (copy / ENCRYPTION).exists()
        assert bool(files_with(copy, WORD)) is not is_encrypted
        seen.add((is_encrypted, is_decided))
        shutil.rmtree(copy)
        if not was_killed:
            break
    # Before the decision, after it, and at the end.
    assert {(rotate, False), (True, True), (True, False)} <= seen


@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends a forked process")
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_kill_while_a_key_is_destroyed_leaves_all_other_files_readable(
    home: Path, tmp_path: Path, step: int
) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        (item, *_) = correct(ada, 4, first=10)
        ada.learn()
        former = runtime._services.store.cipher.user_key_ids("ada")
    blobs = shutil.copytree(home / "blobs", tmp_path / "blobs")

    def forget() -> None:
        with open_runtime(home) as runtime:
            runtime.user("ada").forget(item, rebuild=False)

    template, forgotten = home.rename(tmp_path / "before"), set()
    for point in itertools.count(0, step):
        shutil.copytree(template, home)
        was_killed = _killed(point, forget)
        with open_runtime(home) as runtime:
            assert runtime.verify() == ()
            store = runtime._services.store
            is_forgotten = item not in {signal.id for signal in runtime.user("ada").signals()}
            assert (store.cipher.user_key_ids("ada") != former) is is_forgotten
            opens = [store.cipher.recipients(path.read_bytes()) for path in blobs.glob("*/*")]
            assert any(opens) is not is_forgotten
        forgotten.add(is_forgotten)
        shutil.rmtree(home)
        if not was_killed:
            break
    assert forgotten == {False, True}


def test_json_of_the_home_names_no_secret(home: Path, keys: Path) -> None:
    (file,) = keys.iterdir()
    key = file.read_text().strip()
    assert len(bytes.fromhex(key)) == 32
    assert files_with(home, key) == []
    assert bytes.fromhex(key) not in b"".join(
        path.read_bytes() for path in home.rglob("*") if path.is_file()
    )
    assert json.loads((home / ENCRYPTION).read_bytes())["source"] == "file"
