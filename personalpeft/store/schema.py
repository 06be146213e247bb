"""The tables, as migrations, and the marks by which a database is known as ours.

Invariants: a migration that was ever released is never edited; ``application_id`` says whose file it is and ``user_version`` how many
migrations it has had, both written in the transaction that made them true. Times are text, ISO 8601 in UTC with microseconds, so that
they sort and anybody can read the one file that cannot be made again; columns of JSON hold its canonical spelling.

What only grows (turns, signals, retractions, revisions, judgements, reports, moves) hangs on ``entry``: see ``entries.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import sqlite_utils
from sqlite_utils import Migrations

from personalpeft.errors import HomeError

APPLICATION_ID = 0x50504654  # "PPFT"

_FIRST = """
create table user (
    id text primary key,
    since text not null,
    entries integer not null default 0 check (entries >= 0),
    chain text not null default ''
) strict;

create table entry (
    user text not null references user (id),
    seq integer not null check (seq > 0),
    kind text not null check (kind in ('turn', 'signal', 'retraction', 'revision', 'judgement', 'report', 'move')),
    digest text not null check (length(digest) = 64),
    chain text not null check (length(chain) = 64),
    primary key (user, seq)
) strict, without rowid;

create table turn (
    user text not null,
    id text not null,
    seq integer not null,
    at text not null,
    messages text not null,
    reply text not null,
    stack text not null,
    sampling text not null,
    prompt_tokens integer not null check (prompt_tokens >= 0),
    completion_tokens integer not null check (completion_tokens >= 0),
    finish_reason text not null check (finish_reason in ('stop', 'length', 'cancelled')),
    used text not null,
    primary key (user, id),
    unique (user, seq),
    foreign key (user, seq) references entry (user, seq)
) strict;

create table signal (
    user text not null,
    id text not null,
    seq integer not null,
    kind text not null
        check (kind in ('rating', 'edit', 'preference', 'comment', 'reward', 'demonstration', 'fact')),
    at text not null,
    payload text not null,
    turn text,
    source text not null,
    supersedes text check (supersedes <> id),
    primary key (user, id),
    unique (user, seq),
    unique (user, supersedes),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, turn) references turn (user, id),
    foreign key (user, supersedes) references signal (user, id)
) strict;
create index signal_by_turn on signal (user, turn, kind, seq);
create index signal_by_kind on signal (user, kind, seq);

create table retraction (
    user text not null,
    signal text not null,
    seq integer not null,
    at text not null,
    primary key (user, signal),
    unique (user, seq),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, signal) references signal (user, id)
) strict;

create table layer (
    user text not null references user (id),
    name text not null check (name in ('style', 'memory') or name glob 'skill.?*'),
    born integer not null,
    head text,
    weight real not null default 1.0,
    primary key (user, name),
    foreign key (user, name, head) references revision (user, layer, id)
) strict;

create table revision (
    user text not null,
    id text not null,
    seq integer not null,
    layer text not null,
    digest text not null check (length(digest) = 64),
    base text not null,
    parent text check (parent <> id),
    below text not null,
    recipe text not null,
    inputs text not null,
    at text not null,
    seconds real not null check (seconds >= 0),
    primary key (user, id),
    unique (user, seq),
    unique (user, layer, id),
    check (id = layer || '@' || substr(digest, 1, 12)),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, layer) references layer (user, name),
    foreign key (user, layer, parent) references revision (user, layer, id)
) strict;
create index revision_by_digest on revision (user, digest);

create table judgement (
    user text not null,
    seq integer not null,
    revision text not null,
    verdict text not null check (verdict in ('promoted', 'refused', 'abstained')),
    reason text not null,
    probation integer not null check (probation in (0, 1)),
    scores text not null,
    signals text not null,
    at text not null,
    primary key (user, seq),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, revision) references revision (user, id)
) strict;
create index judgement_by_revision on judgement (user, revision, seq);

create table provenance (
    user text not null,
    revision text not null,
    signal text not null,
    layer text not null,
    role text not null check (role in ('train', 'pinned')),
    primary key (user, revision, signal),
    foreign key (user, layer, revision) references revision (user, layer, id),
    foreign key (user, signal) references signal (user, id)
) strict, without rowid;
create index provenance_by_layer on provenance (user, layer, role, signal);
create index provenance_by_signal on provenance (user, signal);

create table report (
    user text not null,
    seq integer not null,
    revision text,
    at text not null,
    body text not null,
    primary key (user, seq),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, revision) references revision (user, id)
) strict;

create table move (
    user text not null,
    seq integer not null,
    layer text not null,
    before text,
    after text,
    cause text not null,
    at text not null,
    primary key (user, seq),
    check (before is not after),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, layer) references layer (user, name),
    foreign key (user, layer, before) references revision (user, layer, id),
    foreign key (user, layer, after) references revision (user, layer, id)
) strict;
create index move_by_layer on move (user, layer, seq);

create table vector (
    user text not null,
    embedder text not null,
    signal text not null,
    data blob not null check (length(data) > 0 and length(data) % 4 = 0),
    primary key (user, embedder, signal),
    foreign key (user, signal) references signal (user, id)
) strict;
"""


# A live stack is read for every request, by anybody among very many users: the first index holds all of its layers. By its digest alone
# a revision is asked for when files are looked at: does anybody name it?
_SECOND = """
create index layer_live on layer (user, born, name, head, weight);
create index revision_by_file on revision (digest);
"""

# Null is what a layer of its kind has by default (see catalog.py), so that the defaults are not written into every home.
_THIRD = """
alter table layer add column scope text check (scope in ('always', 'near', 'never'));
"""

# A tombstone stands for the content of an entry that was forgotten. Errands are what is still to be destroyed in files; they
# belong to no chain, and there are none but between a forgetting and its end.
_FOURTH = """
create table tombstone (
    user text not null,
    seq integer not null,
    kind text not null check (kind in ('turn', 'signal', 'retraction', 'revision', 'judgement', 'report', 'move')),
    id text,
    at text not null,
    primary key (user, seq),
    foreign key (user, seq) references entry (user, seq)
) strict, without rowid;
create index tombstone_by_id on tombstone (user, id);

create table errand (
    number integer primary key,
    user text not null,
    what text not null check (what in ('blob', 'sessions', 'journal')),
    name text not null
) strict;
create index errand_by_user on errand (user, number);
"""

# Facts are learned from the turns in which they were looked up, which are few among all that were ever had.
_FIFTH = """
create index turn_looked_up on turn (user, seq) where used <> '[]';
"""


def _first(db: sqlite_utils.Database) -> None:
    db.executescript(_FIRST)


def _second(db: sqlite_utils.Database) -> None:
    db.executescript(_SECOND)


def _third(db: sqlite_utils.Database) -> None:
    db.executescript(_THIRD)


def _fourth(db: sqlite_utils.Database) -> None:
    db.executescript(_FOURTH)


def _fifth(db: sqlite_utils.Database) -> None:
    db.executescript(_FIFTH)


_STEPS: dict[str, Callable[[sqlite_utils.Database], None]] = {
    "0001_first": _first,
    "0002_at_scale": _second,
    "0003_scopes": _third,
    "0004_forgetting": _fourth,
    "0005_looked_up": _fifth,
}
# What a reader can do without: indexes, a column that is null in every home that does not have it yet, and tables that are
# empty in every home that does not have them.
_FOR_WRITERS = frozenset({"0002_at_scale", "0003_scopes", "0004_forgetting", "0005_looked_up"})

_migrations = Migrations("personalpeft")
for _name, _step in _STEPS.items():
    _migrations(name=_name)(_step)


def is_current(db: sqlite_utils.Database, home: Path, *, to_read: bool = False) -> bool:
    """Whether the database needs nothing done before use (``to_read``: before it is read); False for an empty or an older one.

    Raises ``HomeError`` for a database of another program and for one that a newer personalpeft has changed.
    """
    (application,) = db.conn.execute("pragma application_id").fetchone()
    (version,) = db.conn.execute("pragma user_version").fetchone()
    (objects,) = db.conn.execute("select count(*) from sqlite_master").fetchone()
    if application == 0 and objects == 0:
        return False
    if application != APPLICATION_ID:
        raise HomeError(
            f"The database in {home} is not ours: another program made it.",
            hint="Choose another folder as home, or move that file away.",
        )
    unknown = [applied.name for applied in _migrations.applied(db) if applied.name not in _STEPS]
    if version > len(_STEPS) or unknown:
        raise HomeError(
            f"The home {home} is from a newer version of personalpeft"
            f" (schema {version}, this one knows {len(_STEPS)}{'; unknown: ' + ', '.join(unknown) if unknown else ''}).",
            hint="Update personalpeft, or choose another home.",
        )
    pending = {step.name for step in _migrations.pending(db)}
    return not (pending - _FOR_WRITERS if to_read else pending)


def migrate(db: sqlite_utils.Database) -> None:
    """Brings the database to the present schema. Call it inside a transaction: then it happens whole or not at all."""
    db.execute(f"pragma application_id={APPLICATION_ID}")
    _migrations.apply(db)
    db.execute(f"pragma user_version={len(_STEPS)}")
