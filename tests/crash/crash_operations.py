"""Operations on a home that the crash tests interrupt, and what must hold afterwards.

``crash_operations.py OPERATION FOLDER [SOCKET]`` performs one of them in a folder that ``prepare``
made; ``live`` never ends. It sends a line for each promise over the inherited socket, else to stdout,
as soon as the promise holds. An error of the library ends it with status 3.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import socket
import sys
import tarfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from write_seam import WriteSeam

import personalpeft
from personalpeft import NothingToLearn, Runtime, User
from personalpeft.clock import SYSTEM
from personalpeft.errors import Forgotten, NotFound, PersonalPeftError
from personalpeft.settings import KEYS, KeySettings
from personalpeft.store import schema
from personalpeft.store.database import Database, fetch_all, insert_rows
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import chain_digest, row_digest
from personalpeft.store.home import DATABASE
from personalpeft.store.home_keys import KeySource, make_keys
from personalpeft.store.locks import Lock
from personalpeft.store.publications import move_notes
from personalpeft.store.reencryption import reencrypt_home
from personalpeft.store.rows import EntryKind
from personalpeft.store.store import Store

Acknowledge = Callable[[str, object], None]
"""Called with the kind and the id of something that the caller was promised."""

REFUSED = 3
SECRET = "Zanzibarquartz"
_EARLIER_HOME = Path(__file__).parents[1] / "data" / "home_before_layout.tar.xz"
_EARLIER_VERSION = 5
_ENCRYPTED_SINCE = 12
_MIGRATIONS = Path(schema.__file__).with_name("migrations")
_CHAINED_TABLES = "select m.name from sqlite_master m, pragma_table_info(m.name) c where m.type = 'table' and c.name = 'user'"
# What each migration did, undone.
_UNDO = {
    5: "drop index turn_looked_up",
    4: "drop table errand; drop table tombstone",
    3: "alter table layer drop column scope",
    2: "drop index layer_live; drop index revision_by_file",
}


def open_home(folder: Path) -> Runtime:
    """Open the home of a folder on the fake backend, on which a learn takes a second."""
    use_keys(folder)
    return personalpeft.open(folder / "home", backend="fake")


def use_keys(folder: Path) -> None:
    """Look for the keys of encrypted homes in a folder, which may be a copy of another."""
    os.environ[KEYS] = str(folder / "keys")


def users(runtime: Runtime) -> list[User]:
    """Return all users of a small home."""
    return [runtime.user(each.id) for each in runtime.users()]


def _correct(user: User, first: int, number: int) -> None:
    for each in range(first, first + number):
        reply = user.chat(f"question {each}", temperature=0)
        user.feedback(reply, edit=f"Ahoy! Answer {each}. Arrr!")


def prepare_home(folder: Path) -> None:
    """Make a home with a learned style, new lessons, a secret turn and a second user."""
    with open_home(folder) as runtime:
        ada, bo = runtime.user("ada"), runtime.user("bo")
        _correct(ada, 0, 6)
        ada.learn()
        bo.remember("My cat is called Mushroom.")
        _correct(bo, 0, 1)
        secret = ada.chat(f"Is {SECRET} a word?", temperature=0)
        ada.feedback(secret, edit=f"Ahoy! {SECRET} is one. Arrr!")
        _correct(ada, 6, 4)
        ada.export(folder / "ada.personal")
        runtime.maintenance.back_up(folder / "copies")
        (folder / "secret").write_text(secret.turn_id)


def _prepare_encrypted_home(folder: Path) -> None:
    use_keys(folder)
    personalpeft.encrypt(folder / "home", "file")
    prepare_home(folder)


def _prepare_earlier_home(folder: Path) -> None:
    with lzma.open(_EARLIER_HOME) as packed, tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder / "archive", filter="data")
    (home,) = (path.parent for path in (folder / "archive").rglob("personalpeft.db"))
    shutil.move(home, folder / "home")


def _prepare_home_of_version(version: int, folder: Path) -> None:
    """Make a home of a schema version, with the rows that an earlier version wrote.

    The rows are of version 5. Later versions are migrated from it, and each adds rows that only it
    can hold. Earlier ones are made by undoing migrations, without the users that have tombstones,
    which came with version 4.
    """
    _prepare_earlier_home(folder)
    with closing(sqlite3.connect(folder / "home" / DATABASE, isolation_level=None)) as db:
        if version < 4:
            tables = [name for (name,) in db.execute(_CHAINED_TABLES)]
            for (user,) in db.execute("select distinct user from tombstone").fetchall():
                for table in tables:
                    db.execute(f"delete from {table} where user = ?", [user])
                db.execute("delete from user where id = ?", [user])
        for undone in range(_EARLIER_VERSION, version, -1):
            db.executescript(_UNDO[undone])
            db.execute("delete from _sqlite_migrations where name like ?", [f"{undone:04}%"])
        for script in sorted(_MIGRATIONS.glob("*.sql"))[_EARLIER_VERSION:version]:
            db.executescript(script.read_text("utf-8"))
            if script.stem == "0009_publications":
                move_notes(db)
            db.execute(
                "insert into _sqlite_migrations (migration_set, name, applied_at)"
                " select migration_set, ?, applied_at from _sqlite_migrations limit 1",
                [script.stem],
            )
            _add_rows(int(script.stem[:4]), db)
        db.execute(f"pragma user_version = {version}")


def _prepare_encrypted_home_of_version(version: int, folder: Path) -> None:
    """Make a home of a schema version, and encrypt it without a migration."""
    _prepare_home_of_version(version, folder)
    home, clock = folder / "home", SYSTEM
    lock = Lock(home / "write.lock", home=home, what="The home is held", now=clock.now)
    database = Database(home / DATABASE, lock, timeout=10.0, read_only=False, key=None)
    keys = make_keys(KeySource.FILE, KeySettings(folder / "keys"), clock.entropy)
    with Store(home, database, now=clock.now, entropy=clock.entropy) as store:
        reencrypt_home(store, keys)


def _add_rows(version: int, db: sqlite3.Connection) -> None:
    """Add rows that a home can hold from a schema version on."""
    (turn,) = fetch_all(db, "select * from turn where user = 'ada' order by seq desc limit 1")
    new = f"t_{version:026}"
    match version:
        case 6:
            db.execute(
                "insert into pending_deletion (user, kind, name) values ('ada', 'blob', ?)",
                ["0" * 64],
            )
        case 7:
            _append(db, "turn", {**turn, "id": new, "conversation": new})
            more = {"id": f"{new[:-1]}x", "conversation": new, "previous": new}
            _append(db, "turn", {**turn, **more})
        case 8:
            (signal,) = fetch_all(
                db,
                "select user, id as signal, at from signal where user = 'ada' and id not in"
                " (select signal from retraction where user = 'ada') order by seq limit 1",
            )
            _append(db, "retraction", {**signal, "purpose": "training"})
        case 9:
            db.execute("insert into publication values ('ada', '/stacks', ?, 1)", ["0" * 64])
        case 10:
            db.execute("update user set trains = 0 where id = 'ada'")
        case 11:
            _append(db, "turn", {**turn, "id": new, "backend": "torch"})
        case 14:
            db.execute(
                "insert into pending_deletion (user, kind, name) values ('ada', 'data_key', ?)",
                ["0" * 32],
            )
        case 15:
            more = {"backend": "torch", "backend_reason": "requested"}
            _append(db, "turn", {**turn, "id": new, **more})


def _append(db: sqlite3.Connection, kind: EntryKind, content: Mapping[str, Any]) -> None:
    """Append a row to a user's chain, with the columns of an earlier version."""
    user = content["user"]
    (tail,) = fetch_all(db, "select entries, chain from user where id = ?", user)
    seq = tail["entries"] + 1
    row = {**content, "seq": seq}
    digest = row_digest(kind, row)
    chain = chain_digest(tail["chain"], seq, kind, digest)
    db.execute("insert into entry values (?, ?, ?, ?, ?)", [user, seq, kind, digest, chain])
    insert_rows(db, kind, list(row), [list(row.values())])
    db.execute("update user set entries = ?, chain = ? where id = ?", [seq, chain, user])


def _feedback(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        ada = runtime.user("ada")
        reply = ada.chat("How do I boil an egg?", temperature=0)
        acknowledge("turn", reply.turn_id)
        acknowledge("signal", ada.feedback(reply, edit="Ahoy! In water. Arrr!"))
        acknowledge("signal", ada.feedback(reply, rating=-1))


def _remember(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        ada = runtime.user("ada")
        acknowledge("signal", ada.remember("My dog is called Biscuit."))


def _learn(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        try:
            report = runtime.user("ada").learn()
        except NothingToLearn:
            return
        acknowledge("revision", report.revision)


def _roll_back(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        ada = runtime.user("ada")
        if ada.stack().entries:
            ada.rollback("style")
        acknowledge("empty", "ada")


def _forget(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        try:
            runtime.user("ada").forget((folder / "secret").read_text())
        except Forgotten:  # An earlier attempt erased it.
            runtime.collect_garbage()
        acknowledge("forgotten", SECRET)


def _forget_user(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        try:
            runtime.forget_user("ada")
        except (Forgotten, NotFound):
            runtime.collect_garbage()
        acknowledge("forgotten", SECRET)


def _publish(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        runtime.publish(to=folder / "published")


def _migrate(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        acknowledge("users", len(runtime.users()))


def _back_up(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        backup = runtime.maintenance.back_up(folder / "copies")
        acknowledge("backup", backup.path.relative_to(folder))


def _restore(folder: Path, acknowledge: Acknowledge) -> None:
    home = folder / "home"
    use_keys(folder)
    personalpeft.restore(folder / "copies", home, replace=True)
    acknowledge("restored", home.name)


def _export(folder: Path, acknowledge: Acknowledge) -> None:
    file = folder / "new.personal"
    if file.exists():  # An earlier attempt wrote it.
        file.unlink()
    with open_home(folder) as runtime:
        runtime.user("ada").export(file)
        acknowledge("file", file.name)


def _import(folder: Path, acknowledge: Acknowledge) -> None:
    with open_home(folder) as runtime:
        if "cy" in [user.id for user in users(runtime)]:
            runtime.forget_user("cy")
        runtime.import_user(folder / "ada.personal", as_user="cy")
        acknowledge("user", "cy")


def live(folder: Path, acknowledge: Acknowledge) -> None:
    """Chat, correct, remember, forget, learn, roll back, publish, back up and import without end.

    What an act may replace is "started" before it. The promise after it is the new state.
    """
    with open_home(folder) as runtime:
        ada = runtime.user("ada")
        for number in count():
            reply = ada.chat(f"question {number}", temperature=0)
            acknowledge("turn", reply.turn_id)
            acknowledge("signal", ada.feedback(reply, edit=f"Ahoy! Answer {number}. Arrr!"))
            acknowledge("signal", ada.remember(f"Fact {number}."))
            _forget_word(ada, f"{SECRET}{number}x", acknowledge)
            if number % 4 == 3:
                acknowledge("started", "head")
                acknowledge("revision", ada.learn().revision)
                acknowledge("head", head_of(ada))
            if number % 8 == 7:
                acknowledge("started", "head")
                if ada.stack().entries:
                    ada.rollback("style")
                acknowledge("head", head_of(ada))
            if number % 16 == 3:
                _copy_everywhere(runtime, folder, acknowledge)


def head_of(user: User) -> str:
    """Return the live revision of a user's style, or nothing."""
    return next((entry.revision for entry in user.stack().entries), "")


def _forget_word(user: User, word: str, acknowledge: Acknowledge) -> None:
    fact = user.remember(f"My word is {word}.")
    acknowledge("signal", fact)
    acknowledge("started", fact)
    user.forget(fact, rebuild=False)
    acknowledge("forgotten", word)


def _copy_everywhere(runtime: Runtime, folder: Path, acknowledge: Acknowledge) -> None:
    """Publish, back up, and import a user, in place of what an earlier call made."""
    acknowledge("started", "published")
    report = runtime.publish(["ada"], to=folder / "published")
    names = [each.name for each in report.stacks if each.name]
    acknowledge("published", names[0].partition(":")[2] if names else "")
    acknowledge("started", "backup")
    for path in (folder / "copies").glob("copy-*"):
        shutil.rmtree(path)
    acknowledge("backup", runtime.maintenance.back_up(folder / "copies").path.relative_to(folder))
    acknowledge("started", "user")
    (folder / "ada.personal").unlink(missing_ok=True)
    runtime.user("ada").export(folder / "ada.personal")
    if "cy" in [user.id for user in users(runtime)]:
        runtime.forget_user("cy")
    runtime.import_user(folder / "ada.personal", as_user="cy")
    acknowledge("user", "cy")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        act: Performs it, once more where an earlier attempt was interrupted.
        prepare: Makes the folder that it starts from.
        erases: Whether it is to erase user ada's secret.
    """

    act: Callable[[Path, Acknowledge], None]
    prepare: Callable[[Path], None] = prepare_home
    erases: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "feedback": Operation(_feedback),
    "remember": Operation(_remember),
    "learn": Operation(_learn),
    "roll-back": Operation(_roll_back),
    "forget": Operation(_forget, erases=True),
    "forget-user": Operation(_forget_user, erases=True),
    "publish": Operation(_publish),
    "migrate": Operation(_migrate, _prepare_earlier_home),
    "back-up": Operation(_back_up),
    "restore": Operation(_restore),
    "export": Operation(_export),
    "import": Operation(_import),
}
"""Operations that end."""
MIGRATIONS: Mapping[str, Operation] = {
    f"migrate-{version}": Operation(_migrate, partial(_prepare_home_of_version, version))
    for version in range(1, len(list(_MIGRATIONS.glob("*.sql"))))
}
"""The migration of a home of each historical schema version."""
ENCRYPTED: Mapping[str, Operation] = {
    f"encrypted-{name}": replace(operation, prepare=_prepare_encrypted_home)
    for name, operation in OPERATIONS.items()
    if operation.prepare is prepare_home
} | {
    f"encrypted-migrate-{version}": Operation(
        _migrate, partial(_prepare_encrypted_home_of_version, version)
    )
    for version in range(_ENCRYPTED_SINCE, len(list(_MIGRATIONS.glob("*.sql"))))
}
"""The operations on an encrypted home, and the migration of one of each version that encrypts."""
EVERY_OPERATION: Mapping[str, Operation] = {**OPERATIONS, **MIGRATIONS, **ENCRYPTED}


def contents(folder: Path) -> dict[str, list[str]]:
    """Return the ids of all that a folder's home promises to keep, by user and kind.

    Beside them, what later schema versions added.
    """
    with open_home(folder) as runtime:
        publications = runtime._services.store.publications
        added = {
            f"{user.id} {kind}": ids
            for user in users(runtime)
            for kind, ids in {
                "conversation": [each.id for each in user.conversations()],
                "turn with its backend": [
                    f"{each.id} {each.backend} {each.backend_reason}" for each in user.turns()
                ],
                "untrained signal": [each.id for each in user.signals() if each.forbids_training],
                "setting": [f"training: {user.summary().training}"],
                "publication": list(map(str, publications.folders(user.id))),
            }.items()
        }
        return {**contents_of(runtime), **added}


def contents_of(runtime: Runtime) -> dict[str, list[str]]:
    """Return the ids of all that an open home promises to keep, by user and kind."""
    return {
        f"{user.id} {kind}": ids
        for user in users(runtime)
        for kind, ids in {
            "turn": [turn.id for turn in user.turns()],
            "signal": [signal.id for signal in user.signals(current=False)],
            "revision": [revision.id for revision in user.revisions()],
        }.items()
    }


def main(operation: str, folder: str, descriptor: str = "") -> int:
    seam = WriteSeam(Path(folder))
    with ExitStack() as opened:
        if descriptor:
            promises = opened.enter_context(socket.socket(fileno=int(descriptor)).makefile("wb"))
        else:
            promises = sys.stdout.buffer
            seam.install()

        def acknowledge(kind: str, what: object) -> None:
            promises.write(json.dumps([kind, str(what)]).encode() + b"\n")
            promises.flush()

        try:
            act = live if operation == "live" else EVERY_OPERATION[operation].act
            act(Path(folder), acknowledge)
            acknowledge("writes", seam.count)
        except PersonalPeftError as error:
            acknowledge("refused", error)
            return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
