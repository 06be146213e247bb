"""The entries that a learn in another home appended to a copy of a user's ledger.

A learn appends revisions, judgements, reports and moves, and nothing else. In the user's own home
they are appended again under the numbers that are next there.

Invariants: remote entries are appended in one transaction, or not at all, and at most once. Since
the copy was made only turns and signals were added to the ledger. So they never replace a head that
they were not judged against, and never bring back what was erased.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from personalpeft.errors import LedgerMoved, PersonalFileError
from personalpeft.store import rows
from personalpeft.store.database import Row, fetch_all, fetch_one
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import NewEntry
from personalpeft.store.id_lookup import resolve_user
from personalpeft.store.revisions import append_and_apply, ensure_layer, read_head, read_holdout
from personalpeft.store.store import Store
from personalpeft.store.user_export import Entry, check_chain
from personalpeft.types import SignalRole

_LEARNED_KINDS = ("revision", "judgement", "report", "move")
# What may have been added meanwhile, as beside a learn in the same home.
_MEANWHILE_KINDS = {"turn", "signal"}
_HINT = "The result is damaged, or was not made by personalpeft. Learn again."
_MOVED_HINT = "Drop this result. The next learn starts from the ledger as it is now."


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """The end of a user's ledger: when the user was created, and the last entry and its chain."""

    since: str
    seq: int
    chain: str


def check_remote_entries(user: str, position: LedgerPosition, entries: Sequence[Entry]) -> None:
    """Check the kinds, columns and digests of remote entries from a position.

    Raises ``PersonalFileError`` if no learn appends such an entry, or a digest does not match.
    """
    check_chain(user, entries, position.seq, position.chain)
    for entry in entries:
        if entry.kind not in _LEARNED_KINDS or entry.forgotten:
            raise PersonalFileError(
                f"A learn cannot append entry {entry.seq}, a {entry.table}.", hint=_HINT
            )


def contents(entries: Iterable[Entry], kind: str) -> list[Row]:
    """Return the rows of a kind, in order."""
    return [entry.content for entry in entries if entry.kind == kind]


def append_remote_entries(
    store: Store,
    user: str,
    position: LedgerPosition,
    entries: Sequence[Entry],
) -> None:
    """Append checked remote entries, in one transaction. The files of its revisions are stored.

    Args:
        store: The open home of the user.
        user: The owner.
        position: Where the copy of the ledger ended.
        entries: What ``check_remote_entries`` accepted.

    Raises:
        LedgerMoved: More than turns and signals were added since the position.
        PersonalFileError: The rows do not fit together, or a held-out signal was trained on.
        NotFound: The user does not exist.
        HomeError: The home cannot be written.
        Busy: Another writer does not finish in time.
    """
    try:
        with store.database.write_transaction() as db:
            resolve_user(db, user)
            check_unmoved(db, user, position)
            _append(db, user, entries)
    except sqlite3.IntegrityError as error:
        raise PersonalFileError(
            f"The rows of the result for {user} do not fit together.", hint=_HINT
        ) from error


def check_unmoved(db: sqlite3.Connection, user: str, position: LedgerPosition) -> None:
    """Raise ``LedgerMoved`` if more than turns and signals was added since a position."""
    sql = (
        "select since, (select chain from entry where user = id and seq = ?) as chain"
        " from user where id = ?"
    )
    # No entry is before the first one.
    expected = {"since": position.since, "chain": position.chain if position.seq else None}
    if fetch_one(db, sql, position.seq, user) != expected:
        raise LedgerMoved(
            f"The ledger of {user} was rewritten since this learn began: something was forgotten.",
            hint=_MOVED_HINT,
        )
    sql = "select distinct kind from entry where user = ? and seq > ?"
    kinds = {row["kind"] for row in fetch_all(db, sql, user, position.seq)}
    if not kinds <= _MEANWHILE_KINDS:
        raise LedgerMoved(
            f"A layer of {user} was learned or moved, or a signal retracted, since this learn "
            "began.",
            hint=_MOVED_HINT,
        )


def _append(db: sqlite3.Connection, user: str, entries: Iterable[Entry]) -> None:
    unjudged: dict[str, str] = {}
    for entry in entries:
        row = entry.content
        if entry.kind == "revision":
            ensure_layer(db, user, row["layer"])
            unjudged[row["id"]] = row["layer"]
        elif entry.kind == "move" and row["before"] != read_head(db, user, row["layer"]):
            raise PersonalFileError(f"A move of {row['layer']} starts elsewhere.", hint=_HINT)
        append_and_apply(db, user, [NewEntry(entry.kind, row)])
        if entry.kind == "judgement" and (layer := unjudged.pop(row["revision"], None)):
            roles = rows.decode_roles(row["signals"])
            held_out = read_holdout(db, user, layer)
            if any(roles.get(signal) == SignalRole.TRAINED for signal in held_out):
                raise PersonalFileError(
                    f"{row['revision']} was trained on a held-out signal.", hint=_HINT
                )
