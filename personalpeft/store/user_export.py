"""One user as rows that can leave the home and come back: the chain of entries with what each says, and the layers.

Invariants: what leaves is one moment of the home; what comes back is chained anew under the name that it gets, in the order
that it had, in one transaction with its files, or not at all. Nothing here trusts what a row says: its digest, its place in
the chain and its columns are looked at, and the tables refuse the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, get_args

import sqlite_utils

from personalpeft.errors import InvalidInput, PersonalFileError
from personalpeft.store import hash_chain
from personalpeft.store.blobs import FileBlobs
from personalpeft.store.catalog import revision_from
from personalpeft.store.database import Row, insert_all, row, rows
from personalpeft.store.id_lookup import has_tombstones, known_user
from personalpeft.store.ledger import signal_from, turn_from
from personalpeft.types import Revision, Role, StackEntry

_JSON, _TEXT, _MAYBE, _WHOLE, _REAL = "json", "text", "text or null", "whole number", "number"
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "turn": {
        **dict.fromkeys(("id", "at", "reply", "finish_reason"), _TEXT),
        **dict.fromkeys(("messages", "stack", "sampling", "used"), _JSON),
        **dict.fromkeys(("prompt_tokens", "completion_tokens"), _WHOLE),
    },
    "signal": {
        **dict.fromkeys(("id", "kind", "at", "source"), _TEXT),
        **dict.fromkeys(("turn", "supersedes"), _MAYBE),
        "payload": _JSON,
    },
    "retraction": dict.fromkeys(("signal", "at"), _TEXT),
    "revision": {
        **dict.fromkeys(("id", "layer", "digest", "base", "inputs", "at"), _TEXT),
        **dict.fromkeys(("below", "recipe"), _JSON),
        "parent": _MAYBE,
        "seconds": _REAL,
    },
    "judgement": {
        **dict.fromkeys(("revision", "verdict", "reason", "at"), _TEXT),
        **dict.fromkeys(("scores", "signals"), _JSON),
        "probation": _WHOLE,
    },
    "report": {"revision": _MAYBE, "at": _TEXT, "body": _JSON},
    "move": {
        **dict.fromkeys(("layer", "cause", "at"), _TEXT),
        **dict.fromkeys(("before", "after"), _MAYBE),
    },
    hash_chain.TOMBSTONE: {"kind": _TEXT, "id": _MAYBE, "at": _TEXT},
}
_SAID = frozenset({"turn", "signal", "retraction"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: ``content`` is its row without user and number, or the tombstone in its place where it was forgotten."""

    seq: int
    kind: str
    digest: str
    chain: str
    forgotten: bool
    content: Row

    @property
    def table(self) -> str:
        """Where its content lies."""
        return hash_chain.TOMBSTONE if self.forgotten else self.kind


@dataclass(frozen=True, slots=True)
class Portable:
    """A user at one moment: all entries in order, and the layers (name, born, head, weight, scope)."""

    user: str
    since: str
    chain: str
    entries: tuple[Entry, ...]
    layers: tuple[Row, ...]

    def contents(self, kind: str) -> list[Row]:
        """What the entries of a kind say that were not forgotten, in order."""
        return [each.content for each in self.entries if each.kind == kind and not each.forgotten]

    def words_alone(self) -> Portable:
        """What the person said and was answered, without anything that was built from it."""
        return replace(
            self, entries=tuple(each for each in self.entries if each.kind in _SAID), layers=()
        )


def take_out(db: sqlite_utils.Database, user: str) -> Portable:
    """The user as they are. Raises ``NotFound``."""
    known_user(db, user)
    (about,) = rows(db, "select since, chain from user where id = ?", user)
    tables = [*hash_chain.KINDS, *([hash_chain.TOMBSTONE] if has_tombstones(db) else [])]
    found: dict[int, tuple[str, Row]] = {}
    for table in tables:
        for each in rows(db, f"select * from {table} where user = ?", user):
            seq = each.pop("seq")
            del each["user"]
            found[seq] = table, each
    chained = rows(
        db, "select seq, kind, digest, chain from entry where user = ? order by seq", user
    )
    return Portable(
        user,
        about["since"],
        about["chain"],
        tuple(
            Entry(
                e["seq"],
                e["kind"],
                e["digest"],
                e["chain"],
                found[e["seq"]][0] == hash_chain.TOMBSTONE,
                found[e["seq"]][1],
            )
            for e in chained
        ),
        tuple(
            {key: each.get(key) for key in ("name", "born", "head", "weight", "scope")}
            for each in rows(db, "select * from layer where user = ? order by born", user)
        ),
    )


def check(portable: Portable) -> tuple[Revision, ...]:
    """Whether it fits together: columns of the right types, digests, a chain without a gap, and rows that can be read; the
    revisions. Raises ``PersonalFileError``.
    """
    if not _is_moment(portable.since):
        raise PersonalFileError("It does not say since when there is its user.", hint=_HINT)
    chain = hash_chain.BEFORE_THE_FIRST
    for number, entry in enumerate(portable.entries, 1):
        if entry.seq != number or entry.kind not in hash_chain.KINDS:
            raise PersonalFileError(f"Entry {number} is missing or of no known kind.", hint=_HINT)
        _check_columns(entry)
        digest = hash_chain.row_digest(
            entry.table, {"user": portable.user, "seq": entry.seq, **entry.content}
        )
        chain = hash_chain.link(chain, entry.seq, entry.kind, digest)
        if (digest, chain) != (entry.digest, entry.chain):
            raise PersonalFileError(f"Entry {number} is not what its digest says.", hint=_HINT)
    if chain != portable.chain:
        raise PersonalFileError("The last entries are missing.", hint=_HINT)
    try:
        return _read(portable)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PersonalFileError("What an entry says cannot be read.", hint=_HINT) from error


def put_in(
    db: sqlite_utils.Database,
    blobs: FileBlobs,
    portable: Portable,
    user: str,
    files: Mapping[str, bytes],
    at: datetime,
    *,
    mark: str,
) -> None:
    """Adds a user who was checked, under a name, with their files; the verdict of each revision is given again with ``mark`` before
    its reason. Call it inside ``writing``. Raises ``InvalidInput`` where the name is taken, ``PersonalFileError`` for rows that
    refer to what is not there.
    """
    there = row(db, "select entries from user where id = ?", user)
    if (there and there["entries"]) or row(db, "select 1 from layer where user = ? limit 1", user):
        raise InvalidInput(
            f"There is a user {user} already.", hint="Give another name for the one that comes in."
        )
    if there is None:
        db.conn.execute("insert into user (id, since) values (?, ?)", (user, portable.since))
    layers = [
        (user, each["name"], each["born"], each["weight"], each["scope"])
        for each in portable.layers
    ]
    insert_all(db, "layer", ("user", "name", "born", "weight", "scope"), layers)
    chained, contents = _chained(portable.entries, user)
    insert_all(db, "entry", ("user", "seq", "kind", "digest", "chain"), chained)
    for table in (*hash_chain.KINDS, hash_chain.TOMBSTONE):
        for content in contents.get(table, ()):
            insert_all(db, table, tuple(content), [tuple(content.values())])
    insert_all(
        db,
        "provenance",
        ("user", "revision", "signal", "layer", "role"),
        _provenance(portable, user),
    )
    heads = [(each["head"], user, each["name"]) for each in portable.layers]
    db.conn.executemany("update layer set head = ? where user = ? and name = ?", heads)
    if chained:
        tail = chained[-1]
        db.conn.execute(
            "update user set entries = ?, chain = ? where id = ?", (tail[1], tail[4], user)
        )
    _mark(db, portable, user, at, mark)
    for digest, written in zip(files, blobs.put_all(files.values()), strict=True):
        if digest != written:
            raise PersonalFileError(f"The file {digest} is not what its digest says.", hint=_HINT)


_HINT = (
    "The file is damaged, or was not written by personalpeft; export it again from where it came."
)


def _read(portable: Portable) -> tuple[Revision, ...]:
    """Has the readers of the tables read everything, and looks at what they take as it comes."""
    user = {"user": portable.user}
    for each in portable.contents("turn"):
        turn = turn_from(each | user)
        known = all(m.role in get_args(Role) and isinstance(m.content, str) for m in turn.messages)
        how = [
            turn.sampling.temperature,
            turn.sampling.top_p,
            turn.sampling.max_tokens,
            turn.sampling.seed,
        ]
        texts = [*turn.used, *turn.sampling.stop, turn.stack.base]
        if not (
            known
            and turn.messages
            and all(map(_is_number, how))
            and _are_texts(texts)
            and _are_entries(turn.stack.entries)
        ):
            raise ValueError(turn.id)
    for each in portable.contents("signal"):
        signal_from(each | user)
    newest = {each["revision"]: each for each in portable.contents("judgement")}
    roles: dict[str, dict[str, str]] = {}
    for _, revision, signal, _, role in _provenance(portable, portable.user):
        roles.setdefault(revision, {})[signal] = role
    revisions = []
    for each in portable.contents("revision"):
        judged = newest[each["id"]] | {"signals": json.dumps(roles.get(each["id"], {}))}
        revisions.append(revision_from({**judged, **each, **user}))
        if not _are_entries(revisions[-1].below):
            raise ValueError(each["id"])
    return tuple(revisions)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_entries(found: Iterable[StackEntry]) -> bool:
    return all(_are_texts((e.layer, e.revision, e.digest)) and _is_number(e.weight) for e in found)


def _check_columns(entry: Entry) -> None:
    known, content = _COLUMNS[entry.table], entry.content
    wrong = [
        name
        for name in {*known, *content}
        if name not in known or not _fits(known[name], content.get(name))
    ]
    if not wrong and entry.forgotten and content["kind"] != entry.kind:
        wrong = ["kind"]
    if not wrong:
        wrong = [
            name
            for name, kind in known.items()
            if kind == _JSON and not _is_canonical(content[name])
        ]
    if not wrong and not _is_moment(content["at"]):
        wrong = ["at"]
    if wrong:
        raise PersonalFileError(
            f"Entry {entry.seq} has a wrong {sorted(wrong)[0][:40]!a}.", hint=_HINT
        )


def _fits(kind: str, value: Any) -> bool:
    match kind:
        case "whole number":
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
        case "number":
            return isinstance(value, float)
        case "text or null":
            return value is None or isinstance(value, str)
    return isinstance(value, str)


def _is_canonical(text: str) -> bool:
    try:
        return hash_chain.as_json(hash_chain.from_json(text), what="value") == text
    except Exception:  # noqa: BLE001 - whatever a stranger's text does to a parser
        return False


def _is_moment(text: str) -> bool:
    try:
        return hash_chain.as_text(hash_chain.as_moment(text)) == text
    except (ValueError, OverflowError):
        return False


def _chained(
    found: Sequence[Entry], user: str
) -> tuple[list[tuple[str, int, str, str, str]], dict[str, list[Row]]]:
    """The entries and rows under a name, numbered and chained anew."""
    chain = hash_chain.BEFORE_THE_FIRST
    chained, contents = [], dict[str, list[Row]]()
    for seq, entry in enumerate(found, 1):
        full = {"user": user, "seq": seq, **entry.content}
        digest = hash_chain.row_digest(entry.table, full)
        chain = hash_chain.link(chain, seq, entry.kind, digest)
        chained.append((user, seq, entry.kind, digest, chain))
        contents.setdefault(entry.table, []).append(full)
    return chained, contents


def _provenance(portable: Portable, user: str) -> Iterable[tuple[str, str, str, str, str]]:
    """Each signal by the role that it first had in a revision."""
    layers = {each["id"]: each["layer"] for each in portable.contents("revision")}
    roles: dict[tuple[str, str], str] = {}
    for each in portable.contents("judgement"):
        for signal, role in hash_chain.from_json(each["signals"]).items():
            roles.setdefault((each["revision"], signal), role)
    return [
        (user, revision, signal, layers.get(revision, ""), role)
        for (revision, signal), role in roles.items()
    ]


def _mark(
    db: sqlite_utils.Database, portable: Portable, user: str, at: datetime, mark: str
) -> None:
    newest = {each["revision"]: each for each in portable.contents("judgement")}
    chains = hash_chain.Chains(db)
    for each in newest.values():
        chains.append(
            user,
            "judgement",
            {**each, "reason": f"{mark}: {each['reason']}", "at": hash_chain.as_text(at)},
        )
    chains.write()
