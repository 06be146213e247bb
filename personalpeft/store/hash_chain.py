"""The chain: every row that is only ever added is an entry of its user, and each entry vouches for the one before.

An entry carries the SHA-256 of its row's canonical content, and a chain value that is the SHA-256 of the chain before, its own number,
kind and digest. The user's row holds the number and the chain value of the last entry. So a row that was changed, removed, added by
another hand or moved is found by deriving the chain again; what is not found is a forgery of the whole chain of a user, end to end.

Columns that are null are left out of the digest: a later migration may add a column without disturbing what was said before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import sqlite_utils

from personalpeft.errors import Damaged, InvalidInput
from personalpeft.ids import check_user_id
from personalpeft.store.database import Row, insert_all, row
from personalpeft.types import canonical_digest, canonical_json

Kind: TypeAlias = Literal["turn", "signal", "retraction", "revision", "judgement", "report", "move"]
KINDS: tuple[Kind, ...] = (
    "turn",
    "signal",
    "retraction",
    "revision",
    "judgement",
    "report",
    "move",
)

TOMBSTONE = "tombstone"
"""The table of what stands in the place of an entry's content that was forgotten: its kind, its id, and when."""

BEFORE_THE_FIRST = ""
_DEEPEST = 64


class Chains:
    """Entries on their way: ``append`` chains them in memory, ``write`` adds them all, table by table, and moves the tails.

    Use it inside ``writing``. Until ``write`` nothing of it can be read: what has to see a user's new entries comes after.
    """

    def __init__(self, db: sqlite_utils.Database) -> None:
        self._db = db
        self._tails: dict[str, tuple[int, str]] = {}
        self._moved: set[str] = set()
        self._entries: list[tuple[str, int, str, str, str]] = []
        self._contents: dict[Kind, dict[tuple[str, ...], list[list[Any]]]] = {}

    def append(self, user: str, kind: Kind, content: Mapping[str, Any]) -> None:
        """The row as the next entry of an existing user. Raises ``InvalidInput`` when a text in it is not valid Unicode."""
        before, chain = self._tail(user)
        seq = before + 1
        full = {"user": user, "seq": seq, **content}
        try:
            digest = row_digest(kind, full)
        except UnicodeEncodeError as error:
            raise _not_unicode() from error
        chain = link(chain, seq, kind, digest)
        self._entries.append((user, seq, kind, digest, chain))
        self._contents.setdefault(kind, {}).setdefault(tuple(full), []).append(list(full.values()))
        self._tails[user] = seq, chain
        self._moved.add(user)

    def write(self) -> None:
        """Adds what was appended since the last time."""
        insert_all(self._db, "entry", ("user", "seq", "kind", "digest", "chain"), self._entries)
        # In this order no row comes before one that it refers to.
        for kind in KINDS:
            for columns, found in self._contents.get(kind, {}).items():
                insert_all(self._db, kind, columns, found)
        tails = [(*self._tails[user], user) for user in self._moved]
        self._db.conn.executemany("update user set entries = ?, chain = ? where id = ?", tails)
        self._entries, self._contents, self._moved = [], {}, set()

    def _tail(self, user: str) -> tuple[int, str]:
        if user not in self._tails:
            found = row(self._db, "select entries, chain from user where id = ?", user)
            if found is None:
                raise ValueError(f"no user {user!r}")
            self._tails[user] = found["entries"], found["chain"]
        return self._tails[user]


def append(db: sqlite_utils.Database, user: str, kind: Kind, content: Mapping[str, Any]) -> None:
    """Adds one row as the next entry of an existing user. Call it inside ``writing``. Raises as ``Chains.append``."""
    chains = Chains(db)
    chains.append(user, kind, content)
    chains.write()


def row_digest(kind: str, content: Row) -> str:
    """The digest of a row as it lies in its table."""
    return canonical_digest(
        [kind, {column: value for column, value in content.items() if value is not None}]
    )


def link(before: str, seq: int, kind: str, digest: str) -> str:
    """The chain value of an entry."""
    return canonical_digest([before, seq, kind, digest])


def ensure_users(db: sqlite_utils.Database, users: Iterable[str], at: datetime) -> None:
    """Makes those users that are not there. Raises ``InvalidId`` for an id that cannot be one."""
    since = as_text(at)
    new = [(check_user_id(user), since) for user in users]
    db.conn.executemany("insert into user (id, since) values (?, ?) on conflict do nothing", new)


def as_text(at: datetime) -> str:
    """A moment as the tables hold it. A moment without a time zone is a mistake of the caller's: ``ValueError``."""
    if at.tzinfo is None:
        raise ValueError("a moment needs a time zone")
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def as_moment(text: str) -> datetime:
    """The reverse of ``as_text``."""
    return datetime.fromisoformat(text)


def as_json(value: Any, *, what: str) -> str:
    """Canonical JSON. Raises ``InvalidInput`` for what JSON cannot hold: NaN, bytes, a lone surrogate, nesting without end."""
    if isinstance(value, Mapping):
        value = dict(value)
    if not _is_shallow(value, _DEEPEST):
        raise InvalidInput(
            f"The {what} is nested more than {_DEEPEST} deep.", hint="Send a flatter value."
        )
    try:
        text = canonical_json(value)
        text.encode()
    except UnicodeEncodeError as error:
        raise _not_unicode() from error
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"The {what} cannot be written as JSON: {error}.",
            hint="Use texts, finite numbers, booleans, null, lists and mappings with text keys.",
        ) from error
    return text


def from_json(text: str) -> Any:
    """The reverse of ``as_json``. Raises ``Damaged`` when a hand other than ours has been at the text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Damaged(
            f"The database holds {text[:40]!a} where JSON should be.",
            hint="Run verify to see what was changed.",
        ) from error


def _is_shallow(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        return levels > 0 and all(_is_shallow(inner, levels - 1) for inner in value.values())
    if isinstance(value, list | tuple):
        return levels > 0 and all(_is_shallow(inner, levels - 1) for inner in value)
    return True


def _not_unicode() -> InvalidInput:
    return InvalidInput(
        "A text holds half of a surrogate pair.", hint="Send text that is valid Unicode."
    )
