"""Export one user as rows, and import them: the chain of entries, their content and the layers.

Invariants: an export is one moment of the home. An import is all or nothing: one transaction with
its files. It chains the entries again under the user's new name, in the same order. No row is
trusted: its digest, its place in the chain and its columns are checked. Table constraints check the
rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from personalpeft.errors import Damaged, InvalidInput, PersonalFileError
from personalpeft.formatting import to_json
from personalpeft.store import hash_chain, rows
from personalpeft.store.database import Row, fetch_all, fetch_one, insert_rows
from personalpeft.store.error_mapping import sqlite3
from personalpeft.store.hash_chain import NewEntry
from personalpeft.store.id_lookup import resolve_user
from personalpeft.store.revisions import append_and_apply, first_roles
from personalpeft.store.rows import COLUMNS, KINDS, TOMBSTONE, Column, EntryKind
from personalpeft.store.store import Store
from personalpeft.types import Revision, Turn, canonical_json

_LEDGER_KINDS = frozenset({"turn", "signal", "retraction"})
_LAYER_COLUMNS = ("name", "born", "head", "weight", "scope")
_TURN, _REVISION = TypeAdapter(Turn), TypeAdapter(Revision)
_HINT = "The file is damaged, or was not written by personalpeft; export it again from its origin."


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. ``content`` is its row without user and number, or its tombstone."""

    seq: int
    kind: EntryKind
    digest: str
    chain: str
    forgotten: bool
    content: Row

    @property
    def table(self) -> str:
        """The table of its content."""
        return TOMBSTONE if self.forgotten else self.kind


@dataclass(frozen=True, slots=True)
class UserExport:
    """A user at one moment: the entries in order, the layers, and whether signals may train."""

    user: str
    since: str
    chain: str
    entries: tuple[Entry, ...]
    layers: tuple[Row, ...]
    trains: bool = True

    def contents(self, kind: str) -> list[Row]:
        """Return the rows of a kind that were not erased, in order."""
        return [each.content for each in self.entries if each.kind == kind and not each.forgotten]

    def without_revisions(self) -> UserExport:
        """Return turns, signals and the settings of layers, without what was built from them."""
        entries = tuple(each for each in self.entries if each.kind in _LEDGER_KINDS)
        layers = tuple({**each, "head": None} for each in self.layers)
        return replace(self, entries=entries, layers=layers)


def read_user(store: Store, user: str) -> UserExport:
    """Return a user at this moment. Raises ``NotFound``, ``Damaged``."""
    with store.database.read_transaction() as db:
        resolve_user(db, user)
        (about,) = fetch_all(db, "select * from user where id = ?", user)
        entries = read_entries(db, user)
        layers = fetch_all(db, "select * from layer where user = ? order by born", user)
    # A home of an earlier version that is open for reading has no scopes.
    exported = tuple({name: row.get(name) for name in _LAYER_COLUMNS} for row in layers)
    trains = bool(about.get("trains", True))
    return UserExport(user, about["since"], about["chain"], tuple(entries), exported, trains)


def read_entries(db: sqlite3.Connection, user: str, after: int = 0) -> list[Entry]:
    """Return the entries of a user after the entry of a number, in order. Raises ``Damaged``."""
    contents: dict[int, tuple[str, Row]] = {}
    for table, row in hash_chain.read_contents(db, user, after):
        del row["user"]
        contents[row.pop("seq")] = table, row
    sql = "select seq, kind, digest, chain from entry where user = ? and seq > ? order by seq"
    entries = []
    for row in fetch_all(db, sql, user, after):
        if row["seq"] not in contents:
            raise Damaged(
                f"Entry {row['seq']} of {user} has lost its content.",
                hint="Run verify for details; restore the home from a backup.",
            )
        table, content = contents[row["seq"]]
        entries.append(Entry(**row, forgotten=table == TOMBSTONE, content=content))
    return entries


def check_export(export: UserExport) -> tuple[Revision, ...]:
    """Check columns, digests, chain and values, and return the revisions.

    Raises ``PersonalFileError``.
    """
    if not _is_time(export.since):
        raise PersonalFileError("It does not say when its user was created.", hint=_HINT)
    if check_chain(export.user, export.entries, 0, hash_chain.GENESIS) != export.chain:
        raise PersonalFileError("The last entries are missing.", hint=_HINT)
    try:
        return _decode_all(export)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PersonalFileError("The content of an entry cannot be read.", hint=_HINT) from error


def check_chain(user: str, entries: Iterable[Entry], seq: int, chain: str) -> str:
    """Check numbers, columns and digests of entries, and return the chain value of the last.

    ``seq`` and ``chain`` are of the entry before them. Raises ``PersonalFileError``.
    """
    for number, entry in enumerate(entries, seq + 1):
        if entry.seq != number or entry.kind not in KINDS:
            raise PersonalFileError(f"Entry {number} is missing or of unknown kind.", hint=_HINT)
        _check_columns(entry)
        row = {"user": user, "seq": entry.seq, **entry.content}
        digest = hash_chain.row_digest(entry.table, row)
        chain = hash_chain.chain_digest(chain, entry.seq, entry.kind, digest)
        if (digest, chain) != (entry.digest, entry.chain):
            raise PersonalFileError(f"Entry {number} does not match its digest.", hint=_HINT)
    return chain


def insert_user(
    store: Store,
    export: UserExport,
    user: str,
    files: Mapping[str, bytes],
    *,
    reason_prefix: str | None,
) -> None:
    """Add a checked export as a new user, with the files that its revisions name.

    Args:
        store: The open home.
        export: What ``check_export`` accepted.
        user: The id of the new user, which was checked.
        files: The packed adapters by their digest, which was checked.
        reason_prefix: Each revision gets its last judgement again, with this before its reason.
            None: nothing is added, so that the same user id gives the same chain.

    Raises:
        InvalidInput: The user exists.
        PersonalFileError: A row refers to one that is missing.
        HomeError: The home cannot be written.
        Busy: Another writer does not finish in time.
    """
    try:
        with store.database.write_transaction() as db:
            _insert_rows(db, export, user, rows.format_time(store.now()), reason_prefix)
            store.blobs.put_many((user, data) for data in files.values())
    except sqlite3.IntegrityError as error:
        raise PersonalFileError(
            f"The rows of {export.user} do not fit together.", hint=_HINT
        ) from error


def _insert_rows(
    db: sqlite3.Connection, export: UserExport, user: str, at: str, reason_prefix: str | None
) -> None:
    existing = fetch_one(db, "select entries from user where id = ?", user)
    has_layers = fetch_one(db, "select 1 from layer where user = ? limit 1", user)
    if (existing and existing["entries"]) or has_layers:
        raise InvalidInput(f"The user {user} exists already.", hint="Give another name.")
    if existing is None:
        db.execute("insert into user (id, since) values (?, ?)", (user, export.since))
    db.execute("update user set trains = ? where id = ?", (int(export.trains), user))
    layers = [(user, r["name"], r["born"], r["weight"], r["scope"]) for r in export.layers]
    insert_rows(db, "layer", ("user", "name", "born", "weight", "scope"), layers)
    entries = [NewEntry(entry.kind, entry.content, entry.forgotten) for entry in export.entries]
    append_and_apply(db, user, entries)
    if reason_prefix is None:
        return
    judgements = (
        {**row, "reason": f"{reason_prefix}: {row['reason']}", "at": at}
        for row in {each["revision"]: each for each in export.contents("judgement")}.values()
    )
    hash_chain.append_entries(db, user, (NewEntry("judgement", row) for row in judgements))


def decode_revisions(
    user: str, revisions: Iterable[Row], judgements: Sequence[Row]
) -> tuple[Revision, ...]:
    """Return revisions with their last judgement and first roles, after checking nested values.

    ``judgements`` are all of theirs, in order. Raises ``KeyError`` for a revision without one, and
    ``ValueError`` for an invalid value.
    """
    newest = {row["revision"]: row for row in judgements}
    roles = first_roles(judgements)
    decoded = []
    for row in revisions:
        signals = {"signals": json.dumps(roles.get(row["id"], {}))}
        revision = rows.decode_revision({**newest[row["id"]], **signals, **row, "user": user})
        _check_types(_REVISION, revision)
        decoded.append(revision)
    return tuple(decoded)


def _decode_all(export: UserExport) -> tuple[Revision, ...]:
    """Decode every row, and check nested values that decoding takes without a check."""
    user = {"user": export.user}
    for row in export.contents("turn"):
        turn = rows.decode_turn(row | user)
        _check_types(_TURN, turn)
        if not turn.messages:
            raise ValueError(turn.id)
    for row in export.contents("signal"):
        rows.decode_signal(row | user)
    return decode_revisions(export.user, export.contents("revision"), export.contents("judgement"))


def _check_types(adapter: TypeAdapter[Any], value: object) -> None:
    """Check the types of all nested values. Raises ``ValueError``."""
    # As JSON, since in Python pydantic's strict mode checks nothing inside a dataclass.
    adapter.validate_json(canonical_json(to_json(value)), strict=True)


def _check_columns(entry: Entry) -> None:
    columns, content = COLUMNS[entry.table], entry.content
    invalid = {
        name
        for name in {*columns, *content}
        if name not in columns or not _fits(columns[name], content.get(name))
    }
    if entry.forgotten and content.get("kind") != entry.kind:
        invalid.add("kind")
    if invalid:
        raise PersonalFileError(
            f"Entry {entry.seq} has an invalid {min(invalid)[:40]!a}.", hint=_HINT
        )


def _fits(column: Column, value: Any) -> bool:
    match column:
        case Column.COUNT:
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
        case Column.REAL:
            return isinstance(value, float)
        case Column.OPTIONAL_TEXT:
            return value is None or isinstance(value, str)
        case Column.TIME:
            return isinstance(value, str) and _is_time(value)
        case Column.JSON:
            return isinstance(value, str) and _is_canonical(value)
    return isinstance(value, str)


def _is_canonical(text: str) -> bool:
    try:
        return rows.to_json(rows.from_json(text), what="value") == text
    except Exception:  # noqa: BLE001 - hostile text may raise anything in a parser
        return False


def _is_time(text: str) -> bool:
    try:
        return rows.format_time(rows.parse_time(text)) == text
    except (ValueError, OverflowError):
        return False
