"""Destroys what a user takes back for good, so that its words are in no file of the home.

Invariants:

- What is decided happens in one transaction: the rows go, a tombstone stands in the place of each, and the user's chain is
  derived anew from the first of them on. A digest of what was said would let somebody who guesses the words know that
  they guessed right, so none is kept: the entry of a tombstone vouches for the tombstone.
- The history is as if what was destroyed had never been live: a move that named it goes, or begins where the one before
  it ended, and the head is where the last move that stands left it.
- What one transaction cannot do (files, the database's own journal) is written down in it as errands. Whoever opens the
  home next does those that are left, so a kill costs nothing but time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import sqlite_utils

from personalpeft.store import hash_chain
from personalpeft.store.base import Destroyed, Removal
from personalpeft.store.blobs import FileBlobs, sync_folder
from personalpeft.store.database import Database, Row, insert_all, row, rows
from personalpeft.store.error_mapping import home_faults
from personalpeft.store.gc import unnamed
from personalpeft.store.hash_chain import Kind
from personalpeft.store.id_lookup import known_user
from personalpeft.types import Json

_AMONG = "in (select value from json_each(?))"


@dataclass(slots=True)
class _Hand:
    """One removal on its way through the tables: ``gone`` are the entries that get a tombstone, with the id by which one may
    ask for them; ``changed`` are the others whose content is no longer what its digest says.
    """

    db: sqlite_utils.Database
    user: str
    gone: dict[int, tuple[Kind, str | None]]
    changed: set[int]

    def take(self, kind: Kind, column: str, ids: Iterable[str], *, named: bool = False) -> None:
        """Destroys the rows of a kind whose ``column`` is one of these."""
        wanted = json.dumps(sorted(ids))
        found = rows(
            self.db,
            f"select seq, {column} from {kind} where user = ? and {column} {_AMONG}",
            self.user,
            wanted,
        )
        self.gone.update({each["seq"]: (kind, each[column] if named else None) for each in found})
        self.db.execute(
            f"delete from {kind} where user = ? and {column} {_AMONG}", [self.user, wanted]
        )

    def drop(self, kind: Kind, seq: int) -> None:
        """Destroys one row."""
        self.gone[seq] = kind, None
        self.db.execute(f"delete from {kind} where user = ? and seq = ?", [self.user, seq])

    def set(self, kind: Kind, seq: int, **columns: str | None) -> None:
        """Changes one row."""
        self.changed.add(seq)
        sets = ", ".join(f"{column} = ?" for column in columns)
        self.db.execute(
            f"update {kind} set {sets} where user = ? and seq = ?",
            [*columns.values(), self.user, seq],
        )


def remove(db: sqlite_utils.Database, user: str, removal: Removal, at: datetime) -> Destroyed:
    """Does what was decided, in the transaction of the caller. The files are left to ``run_errands``."""
    known_user(db, user)
    # Rows go in whatever order; what refers to what is looked at when the transaction ends.
    db.execute("pragma defer_foreign_keys = on")
    hand = _Hand(db, user, {}, set())
    digests = _digests(db, user, removal.revisions)
    _signals(hand, removal)
    _turns(hand, removal)
    _revisions(hand, removal)
    heads = _moves(hand, removal.revisions)
    for seq, body in _rewritten(db, "report", "body", user, removal.rewritten):
        hand.set("report", seq, body=body)
    for seq, scores in _rewritten(db, "judgement", "scores", user, removal.rewritten):
        hand.set("judgement", seq, scores=scores)
    then = hash_chain.as_text(at)
    stones = [(user, seq, kind, name, then) for seq, (kind, name) in hand.gone.items()]
    insert_all(db, "tombstone", ("user", "seq", "kind", "id", "at"), stones)
    if first := min((*hand.gone, *hand.changed), default=0):
        _chain_again(
            db, user, first, {**{seq: kind for seq, (kind, _) in hand.gone.items()}}, hand.changed
        )
    loose = sorted(unnamed(db, digests))
    _note(db, user, loose)
    kinds = [kind for kind, _ in hand.gone.values()]
    return Destroyed(
        turns=kinds.count("turn"),
        signals=kinds.count("signal"),
        revisions=kinds.count("revision"),
        reports=kinds.count("report"),
        files=len(loose),
        emptied=len(removal.emptied),
        heads=heads,
    )


def run_errands(database: Database, blobs: FileBlobs, home: Path, user: str | None = None) -> bool:
    """Destroys the files that were written down, of one user or of all, and clears the database's journal. Whether nothing is
    left to do: somebody who reads an older moment of the database keeps its journal from being cleared.
    """
    with database.turn_to_write(), home_faults(home):
        with database.reading() as db:
            left = _errands(db, user)
            loose = unnamed(db, [each["name"] for each in left if each["what"] == "blob"])
        for each in left:
            # A build of what is left may have come to the same bytes since.
            if each["what"] == "blob" and each["name"] in loose:
                place = blobs.place(each["name"])
                place.unlink(missing_ok=True)
                if place.parent.is_dir():
                    sync_folder(place.parent)
            elif each["what"] == "sessions":
                with suppress(FileNotFoundError):
                    shutil.rmtree(home / "sessions" / each["user"])
        if not left:
            return True
        if not database.clear_journal():
            return False
        with database.writing() as db:
            db.conn.executemany(
                "delete from errand where number = ?", [(each["number"],) for each in left]
            )
    return True


def has_errands(database: Database) -> bool:
    """Whether something that was forgotten is still to be destroyed."""
    with database.reading() as db:
        return bool(_errands(db, None, limit=1))


def _errands(db: sqlite_utils.Database, user: str | None, limit: int = -1) -> list[Row]:
    if user is None:
        return rows(db, "select * from errand order by number limit ?", limit)
    return rows(db, "select * from errand where user = ? order by number limit ?", user, limit)


def _note(db: sqlite_utils.Database, user: str, digests: Iterable[str]) -> None:
    what = [("blob", digest) for digest in digests] + [("sessions", ""), ("journal", "")]
    insert_all(db, "errand", ("user", "what", "name"), [(user, kind, name) for kind, name in what])


def _digests(db: sqlite_utils.Database, user: str, revisions: Iterable[str]) -> list[str]:
    found = rows(
        db,
        f"select digest from revision where user = ? and id {_AMONG}",
        user,
        json.dumps(sorted(revisions)),
    )
    return [each["digest"] for each in found]


def _signals(hand: _Hand, removal: Removal) -> None:
    gone = json.dumps(sorted(removal.signals))
    hand.db.execute(f"delete from vector where user = ? and signal {_AMONG}", [hand.user, gone])
    heirs = rows(
        hand.db,
        f"select seq from signal where user = ?1 and supersedes {_AMONG.replace('?', '?2')}"
        f" and id not {_AMONG.replace('?', '?2')}",
        hand.user,
        gone,
    )
    for each in heirs:
        hand.set("signal", each["seq"], supersedes=None)
    hand.take("retraction", "signal", removal.signals)
    hand.take("signal", "id", removal.signals, named=True)


def _turns(hand: _Hand, removal: Removal) -> None:
    hand.take("turn", "id", removal.turns, named=True)
    for turn_id, kept in removal.emptied.items():
        found = row(
            hand.db, "select seq, used from turn where user = ? and id = ?", hand.user, turn_id
        )
        if found is not None:
            used = [
                signal
                for signal in hash_chain.from_json(found["used"])
                if signal not in removal.signals
            ]
            messages = hash_chain.as_json([message.plain() for message in kept], what="messages")
            said = hash_chain.as_json(used, what="list of signals used")
            hand.set("turn", found["seq"], messages=messages, reply="", used=said)


def _revisions(hand: _Hand, removal: Removal) -> None:
    gone = json.dumps(sorted(removal.revisions))
    hand.db.execute(
        f"delete from provenance where user = ? and revision {_AMONG}", [hand.user, gone]
    )
    hand.take("judgement", "revision", removal.revisions)
    hand.take("report", "revision", removal.revisions)
    hand.take("revision", "id", removal.revisions, named=True)


def _moves(hand: _Hand, revisions: frozenset[str]) -> dict[str, str | None]:
    """The moves as they would have been without these revisions; the head of each layer whose head was one of them."""
    moved: dict[str, str | None] = {}
    for move in rows(hand.db, "select * from move where user = ? order by seq", hand.user):
        now = moved.get(move["layer"])
        after = now if move["after"] in revisions else move["after"]
        if after == now:
            hand.drop("move", move["seq"])
        elif (now, after) != (move["before"], move["after"]):
            hand.set("move", move["seq"], before=now, after=after)
        moved[move["layer"]] = after
    heads = {}
    for layer in rows(hand.db, "select name, head from layer where user = ?", hand.user):
        if layer["head"] in revisions:
            heads[layer["name"]] = moved.get(layer["name"])
            hand.db.execute(
                "update layer set head = ? where user = ? and name = ?",
                [heads[layer["name"]], hand.user, layer["name"]],
            )
    return heads


def _rewritten(
    db: sqlite_utils.Database, table: str, column: str, user: str, rewrite: Callable[[Json], Json]
) -> list[tuple[int, str]]:
    changed = []
    for each in rows(
        db, f"select seq, {column} as text from {table} where user = ? order by seq", user
    ):
        text = hash_chain.as_json(rewrite(hash_chain.from_json(each["text"])), what=table)
        if text != each["text"]:
            changed.append((each["seq"], text))
    return changed


def _chain_again(
    db: sqlite_utils.Database, user: str, first: int, gone: dict[int, Kind], changed: Iterable[int]
) -> None:
    """Derives the chain of a user anew from an entry on, and the digests of those that say something else now."""
    anew = {*gone, *changed}
    before = row(db, "select chain from entry where user = ? and seq = ?", user, first - 1)
    chain = before["chain"] if before else hash_chain.BEFORE_THE_FIRST
    derived = []
    for entry in rows(
        db,
        "select seq, kind, digest from entry where user = ? and seq >= ? order by seq",
        user,
        first,
    ):
        seq, kind, digest = entry["seq"], entry["kind"], entry["digest"]
        if seq in anew:
            table = hash_chain.TOMBSTONE if seq in gone else kind
            content = row(db, f"select * from {table} where user = ? and seq = ?", user, seq)
            digest = hash_chain.row_digest(table, content or {})
        chain = hash_chain.link(chain, seq, kind, digest)
        derived.append((digest, chain, user, seq))
    db.conn.executemany(
        "update entry set digest = ?, chain = ? where user = ? and seq = ?", derived
    )
    db.execute("update user set chain = ? where id = ?", [chain, user])
