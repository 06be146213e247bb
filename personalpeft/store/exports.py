"""Records of what was exported of each user: when, in which form, and the digest of the file.

Invariants: a record is durable before the user is read, so an erasure can list every file. A record
has no words. An erasure deletes the digests of a user's records, since the digest of a file that
had the erased words could confirm a guess of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from personalpeft.store import rows
from personalpeft.store.database import Database, fetch_all, has_table
from personalpeft.store.id_lookup import resolve_user


class ExportKind(StrEnum):
    """The form of what was exported."""

    PERSONAL = "personal"
    PEFT = "peft"
    GGUF = "gguf"
    MERGED = "merged"
    LEARN_BUNDLE = "learn_bundle"


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """One file or bundle that was exported.

    Attributes:
        at: When it was begun.
        kind: Its form.
        digest: The SHA-256 of the file, or of a folder's tensors. None: it was not finished, was
            not hashed, or something was erased since.
    """

    at: datetime
    kind: ExportKind
    digest: str | None


class Exports:
    """The exports of all users of a home."""

    def __init__(self, database: Database, now: Callable[[], datetime]) -> None:
        self._database, self._now = database, now

    @contextmanager
    def recording(self, user: str, kind: ExportKind) -> Iterator[Callable[[str], None]]:
        """Record an export around reading the user and writing. If that raises, nothing is recorded.

        Yields a function that takes the digest. A home that is open for reading records nothing.
        """
        if self._database.read_only:
            yield lambda digest: None
            return
        with self._database.write_transaction() as db:
            resolve_user(db, user)
            sql = "insert into export (user, at, kind) values (?, ?, ?)"
            at = rows.format_time(self._now())
            record = db.execute(sql, [user, at, str(kind)]).lastrowid

        def set_digest(digest: str) -> None:
            with self._database.write_transaction() as db:
                # Not if something was erased since.
                sql = "update export set digest = ? where id = ? and digest is null"
                db.execute(sql, [digest, record])

        try:
            yield set_digest
        except BaseException:
            with self._database.write_transaction() as db:
                db.execute("delete from export where id = ?", [record])
            raise

    def of_user(self, user: str) -> tuple[ExportRecord, ...]:
        """Return what was exported of a user, oldest first."""
        with self._database.read_transaction() as db:
            if not has_table(db, "export"):
                return ()
            found = fetch_all(db, "select * from export where user = ? order by id", user)
        return tuple(
            ExportRecord(rows.parse_time(row["at"]), ExportKind(row["kind"]), row["digest"] or None)
            for row in found
        )
