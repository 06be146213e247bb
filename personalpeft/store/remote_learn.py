"""The entries that a learn in another home appended to a copy of a user's ledger.

A learn appends revisions, judgements, reports and moves, and nothing else. In the user's own home
they are appended again under the numbers that are next there.

Invariants: remote entries are appended in one transaction, or not at all, and at most once. Since the copy was made only turns and signals were added to the ledger. So they never
replace a head that they were not judged against, and never bring back what was erased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from personalpeft.errors import LedgerMoved, PersonalFileError
from personalpeft.store import rows
from personalpeft.store.database import Row, fetch_all, fetch_one
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import GENESIS, NewEntry
from personalpeft.store.id_lookup import resolve_user
from personalpeft.store.revisions import append_and_apply, ensure_layer, read_head, read_holdout
from personalpeft.store.store import Store
from personalpeft.store.user_export import Entry, check_chain, read_entries
from personalpeft.types import SignalRole

_LEARNED_KINDS = ("revision", "judgement", "report", "move")
# What may have been added meanwhile, as beside a learn in the same home.
_MEANWHILE_KINDS = ("turn", "signal")
_HINT = "The result is damaged, or was not made by personalpeft. Learn again."
_MOVED_HINT = "Drop this result. The next learn starts from the ledger as it is now."


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """The end of a user's ledger: when the user was created, and the last entry and its chain."""

    since: str
    seq: int
    chain: str


def read_remote_entries(store: Store, user: str, position: LedgerPosition) -> tuple[Entry, ...]:
    """Return what was appended to a user's ledger after a position.

    Raises ``LedgerMoved`` if the ledger does not have the position, and ``NotFound``.
    """
    with store.database.read_transaction() as db:
        resolve_user(db, user)
        _check_position(db, user, position)
        return tuple(read_entries(db, user, position.seq))


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
    _check_position(db, user, position)
    sql = "select distinct kind from entry where user = ? and seq > ?"
    kinds = {row["kind"] for row in fetch_all(db, sql, user, position.seq)}
    if kinds & set(_LEARNED_KINDS):
        raise LedgerMoved(
            f"A layer of {user} was learned or moved since this learn began.", hint=_MOVED_HINT
        )
    if not kinds <= set(_MEANWHILE_KINDS):
        raise LedgerMoved(f"{user} retracted a signal since this learn began.", hint=_MOVED_HINT)


def _check_position(db: sqlite3.Connection, user: str, position: LedgerPosition) -> None:
    about = fetch_one(db, "select since from user where id = ?", user)
    sql = "select chain from entry where user = ? and seq = ?"
    last = fetch_one(db, sql, user, position.seq) if position.seq else {"chain": GENESIS}
    if (
        about is None
        or about["since"] != position.since
        or last is None
        or last["chain"] != position.chain
    ):
        raise LedgerMoved(
            f"The ledger of {user} was rewritten since this learn began: something was forgotten.",
            hint=_MOVED_HINT,
        )


def _append(db: sqlite3.Connection, user: str, entries: Iterable[Entry]) -> None:
    unjudged: set[str] = set()
    for entry in entries:
        row, head = entry.content, None
        if entry.kind == "revision":
            ensure_layer(db, user, row["layer"])
            unjudged.add(row["id"])
        elif entry.kind == "move":
            head = read_head(db, user, row["layer"])
        append_and_apply(db, user, [NewEntry(entry.kind, row)])
        if entry.kind == "move" and head != row["before"]:
            raise PersonalFileError(f"A move of {row['layer']} starts elsewhere.", hint=_HINT)
        if entry.kind == "judgement" and row["revision"] in unjudged:
            unjudged.remove(row["revision"])
            _check_trained(db, user, row["revision"], rows.decode_roles(row["signals"]))


def _check_trained(
    db: sqlite3.Connection, user: str, revision: str, roles: Mapping[str, str]
) -> None:
    """Raise ``PersonalFileError`` if a held-out signal was trained on."""
    (row,) = fetch_all(db, "select layer from revision where user = ? and id = ?", user, revision)
    held_out = read_holdout(db, user, row["layer"])
    if any(roles.get(signal) == SignalRole.TRAINED for signal in held_out):
        raise PersonalFileError(f"{revision} was trained on a held-out signal.", hint=_HINT)
