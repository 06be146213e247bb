"""The log of what was forgotten: a backup from before still holds it, and a restore forgets it again.

A line names a user by a digest of the id and of the microsecond at which the user was made. It names
an item by that digest and the item's id. It names a layer by that digest and the time of the layer's
first revision. So the log has no words and no user's id, and a user who is made later with the same
id is another one. It lies in the home and beside its backups, so that one of them outlives the loss
of the other.

Earlier versions named an item by its id alone, and a user by the id of the user's oldest item. Such
a line counts for every user who has that item.

Invariants: a line is durable before the erasure begins, since a kill in between would leave an
erased item that no restore forgets. A torn last line counts as none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from personalpeft import file_system
from personalpeft.store.database import Database, fetch_all
from personalpeft.store.error_mapping import map_home_errors, sqlite3
from personalpeft.store.rows import TOMBSTONE
from personalpeft.types import canonical_digest

LOG = "forgotten.jsonl"
_KEY_LENGTH = 32  # hex digits
_FOLDERS = "backup-folders.json"

ErasedKind: TypeAlias = Literal["item", "user", "layer"]


@dataclass(frozen=True, slots=True)
class LoggedErasure:
    """An erased user, or an erased turn, signal or layer of a user.

    ``item`` is "<key of the user>", "<key>/<id>" of a turn or signal, or "<key>/<time of its first
    revision>" of a layer.
    """

    kind: ErasedKind
    item: str

    @property
    def owner_key(self) -> str:
        """The key by which a home finds the user."""
        return self.item.partition("/")[0]

    @property
    def name(self) -> str:
        """What was erased of the user: the id of an item, or the time of a layer."""
        return self.item.rpartition("/")[2]


class ErasureLog:
    """The log of one home, and its copies beside the home's backups."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def append(self, *erasures: LoggedErasure) -> None:
        """Record erasures durably, also beside the backups that can be reached.

        The next backup brings the others up to date. Raises ``HomeError``.
        """
        with map_home_errors(self._home):
            _append(self._home / LOG, erasures)
        for folder in self.folders():
            with suppress(OSError):
                if folder.is_dir():
                    _append(folder / LOG, erasures)

    def read(self) -> tuple[LoggedErasure, ...]:
        """Return all erasures, oldest first. Raises ``OSError``."""
        return read_log(self._home)

    def has_user(self, user: str, since: str) -> bool:
        """Return whether a user who was made at a time was forgotten. Raises ``OSError``."""
        return LoggedErasure("user", user_key(user, since)) in self.read()

    def copy_to(self, folder: Path) -> None:
        """Bring the log in a folder of backups up to date, and list the folder.

        The caller has the write lock. Raises ``HomeError``.
        """
        folder = folder.absolute()
        with map_home_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _append(folder / LOG, self.read())
            self.list_folders([folder])

    def list_folders(self, folders: Iterable[Path]) -> None:
        """List folders of backups beside those that are listed already. Raises ``OSError``."""
        known = self.folders()
        listed = tuple(dict.fromkeys((*known, *folders)))
        if listed != known:
            text = json.dumps([str(each) for each in listed])
            file_system.replace_file(self._home / _FOLDERS, text.encode())

    def folders(self) -> tuple[Path, ...]:
        """Return the folders that backups of this home were written to."""
        try:
            return tuple(map(Path, json.loads((self._home / _FOLDERS).read_bytes())))
        except (OSError, ValueError, TypeError):
            return ()


def read_log(folder: Path) -> tuple[LoggedErasure, ...]:
    """Return the erasures that a folder's log names, oldest first; none without a log.

    Raises ``OSError`` for a log that cannot be read: without it forgotten items would come back.
    """
    lines = _read_bytes(folder).splitlines()
    return tuple(dict.fromkeys(each for line in lines for each in _parse(line)))


def count_unreadable_lines(folder: Path) -> int:
    """Return how many whole lines of a folder's log name no erasure. Raises ``OSError``."""
    *lines, _ = _read_bytes(folder).split(b"\n")
    return sum(1 for line in lines if line.strip() and not _parse(line))


def _read_bytes(folder: Path) -> bytes:
    with suppress(FileNotFoundError, NotADirectoryError):
        return (folder / LOG).read_bytes()
    return b""


def _parse(line: bytes) -> list[LoggedErasure]:
    with suppress(ValueError, AttributeError):
        return [
            LoggedErasure(kind, item)
            for kind, item in json.loads(line).items()
            if kind in get_args(ErasedKind) and isinstance(item, str)
        ]
    return []


def merge_logs(folders: Iterable[Path], into: Path) -> tuple[LoggedErasure, ...]:
    """Write the erasures of several logs into the log of another folder, and return them.

    Raises ``OSError``.
    """
    merged = tuple(dict.fromkeys(each for folder in folders for each in read_log(folder)))
    _append(into / LOG, merged)
    return merged


def read_tombstones(db: sqlite3.Connection) -> tuple[LoggedErasure, ...]:
    """Return the erased turns and signals that a database names."""
    sql = (
        f"select u.id as user, u.since, t.id from {TOMBSTONE} t join user u on u.id = t.user"
        " where t.id is not null and t.kind in ('turn', 'signal')"
    )
    return tuple(
        LoggedErasure("item", f"{user_key(row['user'], row['since'])}/{row['id']}")
        for row in fetch_all(db, sql)
    )


def find_owners(database: Database, erasures: Iterable[LoggedErasure]) -> dict[str, set[str]]:
    """Return the users of a home by the key of each erasure, as far as they exist."""
    owners: dict[str, set[str]] = {each.owner_key: set() for each in erasures}
    for row in database.fetch_all("select id, since from user"):
        if (key := user_key(row["id"], row["since"])) in owners:
            owners[key].add(row["id"])
    among = "id in (select value from json_each(?))"
    sql = f"select id, user from turn where {among} union select id, user from signal where {among}"
    items = json.dumps(list(owners))
    for row in database.fetch_all(sql, items, items):
        owners[row["id"]].add(row["user"])
    return owners


def user_key(user: str, since: str) -> str:
    """Return what the log calls a user. ``since`` is when the user was made, as in the database."""
    return f"u_{canonical_digest([user, since])[:_KEY_LENGTH]}"


def read_user_key(database: Database, user: str) -> str:
    """Return what the log calls an existing user."""
    (row,) = database.fetch_all("select since from user where id = ?", user)
    return user_key(user, row["since"])


def _append(path: Path, erasures: Sequence[LoggedErasure]) -> None:
    """Append the erasures that a log does not have yet."""
    known = set(read_log(path.parent))
    new = [each for each in erasures if each not in known]
    if not new:
        return
    # Another process may append at the same moment.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "rb+") as file:
        data = file.read()
        # A torn line would swallow the next one.
        torn = b"\n" if data and not data.endswith(b"\n") else b""
        lines = (json.dumps({each.kind: each.item}) + "\n" for each in new)
        file.write(torn + "".join(lines).encode())
        file.flush()
        file_system.sync_file(file.fileno())
    file_system.sync_folder(path.parent)
