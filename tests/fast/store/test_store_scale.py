"""One user's request costs the same however many users there are: no statement scans all rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_makers import BASE, add_fact, add_revision, add_turn, opened, packed

from benchmarks.bulk import NewRevision, add_revisions
from personalpeft.store.error_mapping import sqlite3 as ours
from personalpeft.store.gc import collect_garbage
from personalpeft.store.integrity import verify
from personalpeft.store.store import Store
from personalpeft.types import SignalKind

# The schema and the migrations do not grow with the home. json_each scans its argument. Deletions
# are pending only during an erasure.
_SHORT = {"sqlite_master", "_sqlite_migrations", "json_each", "pending_deletion", "CONSTANT"}


def learn(store: Store) -> None:
    fact, question = add_fact(store), add_fact(store)
    store.ledger.signals("ada")
    store.ledger.turns("ada", using=[fact.id])
    store.catalog.stack("ada", BASE)
    store.catalog.used_signals("ada", "style")
    store.catalog.holdout("ada", "style")
    parent = add_revision(store, signals={fact.id: "trained", question.id: "held_out"})
    add_revision(store, b"two", parent=parent.id, signals={fact.id: "trained"})
    store.catalog.layers("ada")
    store.catalog.add_report("ada", {})
    store.catalog.reports("ada")


def chat(store: Store) -> None:
    store.catalog.ensure_user("ada")
    store.catalog.stack("ada", BASE)
    store.ledger.signals("ada", kinds=[SignalKind.FACT, SignalKind.COMMENT])
    fact = add_fact(store)
    store.catalog.add_vectors("ada", "minilm", {fact.id: np.ones(2, np.float32)})
    store.catalog.vectors("ada", "minilm")
    turn = add_turn(store)
    signal = store.ledger.add_signal("ada", SignalKind.RATING, {"value": 1}, turn=turn.id)
    store.ledger.add_signal("ada", SignalKind.RATING, {"value": -1}, turn=turn.id[:-1])
    store.ledger.retract("ada", signal.id)


def browse(store: Store) -> None:
    learn(store)
    turn = add_turn(store)
    store.ledger.turn("ada", turn.id)
    store.ledger.turns("ada", limit=3)
    store.catalog.head_moves("ada")
    store.catalog.head_moves("ada", layer="style")
    revision = store.catalog.revisions("ada")[0]
    store.catalog.revisions("ada", layer="style")
    store.catalog.revision("ada", revision.digest[:9])
    store.catalog.move_head("ada", "style", revision.id, base=BASE, cause="rollback")
    store.catalog.set_weight("ada", "style", 0.5)
    store.catalog.set_scope("ada", "style", "near")
    store.catalog.users(after="a")
    store.catalog.user("ada")
    for unknown in (store.catalog.user, store.catalog.layers):
        with pytest.raises(LookupError):
            unknown("adda")
    with pytest.raises(LookupError):
        store.catalog.revision("ada", "style@nothing")
    add_revisions(store, [NewRevision(*packed("eve"), {})])
    collect_garbage(store)


@pytest.mark.parametrize("work", [chat, learn, browse], ids=lambda work: work.__name__)
def test_no_statement_scans_the_rows_of_all_users(
    home: Path, work: Callable[[Store], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: set[str] = set()
    connect = ours.connect
    opened(home).close()  # The creation of the home is not measured.
    monkeypatch.setattr(ours, "connect", _tracing_connect(connect, statements.add))
    with opened(home) as store:
        work(store)
    with closing(connect(home / "personalpeft.db")) as database:
        walks = {
            (step, statement)
            for statement in statements
            if statement.lstrip().lower().startswith(("select", "insert", "update", "delete"))
            for *_, step in database.execute(f"explain query plan {statement}")
            if step.startswith("SCAN ")
            and step.split()[1] not in _SHORT
            and not step.startswith("SCAN (")
        }
    assert len(statements) > 20
    assert walks == set()


def test_turns_are_found_by_their_items_through_an_index(
    home: Path,
) -> None:
    statements: list[str] = []
    with opened(home) as store:
        add_turn(store, used=["s_1"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "connect", _tracing_connect(ours.connect, statements.append))
        with opened(home) as store:
            store.ledger.turns("ada", using=["s_1"])
        (statement,) = {each for each in statements if "used" in each}
    with closing(ours.connect(home / "personalpeft.db")) as database:
        plan = [step for *_, step in database.execute(f"explain query plan {statement}")]
    assert any("USING INDEX turn_looked_up (user=?)" in step for step in plan)
    assert not any("TEMP B-TREE FOR ORDER BY" in step for step in plan)


def _tracing_connect(
    connect: Callable[..., Any], note: Callable[[str], object]
) -> Callable[..., Any]:
    def traced_connect(*args: Any, **more: Any) -> Any:
        connection = connect(*args, **more)
        connection.set_trace_callback(note)
        return connection

    return traced_connect


_FORMER = (
    "drop index layer_live",
    "drop index revision_by_file",
    "drop index turn_looked_up",
    "drop index turn_in_conversation",
    "drop index turn_by_reply",
    "alter table turn drop column conversation",
    "alter table turn drop column previous",
    "alter table turn drop column backend",
    "alter table turn drop column backend_reason",
    "alter table layer drop column scope",
    "drop table tombstone",
    "drop table pending_deletion",
    "drop table publication",
    "drop table data_key",
    "drop table export",
    "alter table user drop column trains",
    "delete from _sqlite_migrations where name <> '0001_first'",
    "pragma user_version = 1",
)


def _downgrade(home: Path) -> None:
    with opened(home) as store:
        add_fact(store)
        add_revision(store)
    with closing(sqlite3.connect(home / "personalpeft.db")) as database:
        for statement in _FORMER:
            database.execute(statement)
        database.commit()


def test_home_of_the_former_version_is_migrated(home: Path) -> None:
    _downgrade(home)
    with opened(home) as store:
        assert store.catalog.stack("ada", BASE).entries
        assert verify(store) == ()
    with closing(sqlite3.connect(home / "personalpeft.db")) as database:
        names = {
            name
            for (name,) in database.execute("select name from sqlite_master where type = 'index'")
        }
        assert {"layer_live", "revision_by_file", "turn_looked_up", "turn_by_reply"} <= names
        assert database.execute("pragma user_version").fetchone() == (16,)


def test_home_of_the_former_version_can_be_read_without_migration(home: Path) -> None:
    _downgrade(home)
    before = (home / "personalpeft.db").read_bytes()
    with opened(home, read_only=True) as store:
        assert store.catalog.stack("ada", BASE).entries
        assert [layer.scope for layer in store.catalog.layers("ada")] == ["always"]
        assert [user.id for user in store.catalog.users()] == ["ada"]
        assert collect_garbage(store, dry_run=True).blobs == 0
        assert store.ledger.turns("ada", using=["s_1"]) == ()
        assert store.ledger.conversation_links("ada") == ()
        assert verify(store) == ()
    assert (home / "personalpeft.db").read_bytes() == before
