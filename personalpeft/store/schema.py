"""The tables, as migrations, and the marks that identify a database of this package.

Invariants: a released migration is never edited. ``application_id`` says which program owns the
file and ``user_version`` how many migrations it has had; both are written in the migration's
transaction.

Each row of a table that only grows (turn, signal, retraction, revision, judgement, report, move)
belongs to an ``entry``; see ``hash_chain``. Digests cover the names of such tables and columns.
"""

from __future__ import annotations

from pathlib import Path

import sqlite_utils
from sqlite_utils import Migrations

from personalpeft.errors import HomeError
from personalpeft.store.error_mapping import sqlite3

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
    kind text not null check (kind in (
        'turn', 'signal', 'retraction', 'revision', 'judgement', 'report', 'move'
    )),
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
    kind text not null check (kind in (
        'rating', 'edit', 'preference', 'comment', 'reward', 'demonstration', 'fact'
    )),
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

# The live stack is read for every request; the first index covers it. The second finds whether any
# revision names a file.
_AT_SCALE = """
create index layer_live on layer (user, born, name, head, weight);
create index revision_by_file on revision (digest);
"""

# Null is the default scope of a layer of its kind.
_SCOPES = """
alter table layer add column scope text check (scope in ('always', 'near', 'never'));
"""

# A tombstone replaces the content of an erased entry. The other table lists what is still to be
# deleted from files. It is not chained, and it is empty except during an erasure.
_FORGETTING = """
create table tombstone (
    user text not null,
    seq integer not null,
    kind text not null check (kind in (
        'turn', 'signal', 'retraction', 'revision', 'judgement', 'report', 'move'
    )),
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

# Facts are learned from the turns that looked them up, which are few among all turns.
_LOOKED_UP = """
create index turn_looked_up on turn (user, seq) where used <> '[]';
"""

_PENDING_DELETIONS = """
alter table errand rename to pending_deletion;
alter table pending_deletion rename column number to id;
alter table pending_deletion rename column what to kind;
drop index errand_by_user;
create index pending_deletion_by_user on pending_deletion (user, id);
"""

_SCRIPTS = {
    "0001_first": _FIRST,
    "0002_at_scale": _AT_SCALE,
    "0003_scopes": _SCOPES,
    "0004_forgetting": _FORGETTING,
    "0005_looked_up": _LOOKED_UP,
    "0006_pending_deletions": _PENDING_DELETIONS,
}
# The others add indexes, a nullable column and tables that a reader can do without.
_NEEDED_TO_READ = frozenset({"0001_first"})

_migrations = Migrations("personalpeft")


def _register(name: str, script: str) -> None:
    @_migrations(name=name)
    def apply(db: sqlite_utils.Database) -> None:
        db.executescript(script)


for _name, _script in _SCRIPTS.items():
    _register(_name, _script)


def is_current(connection: sqlite3.Connection, home: Path, *, to_read: bool = False) -> bool:
    """Return whether the database can be used, or with ``to_read`` be read, without a migration.

    It is False for an empty database and one of an earlier version.

    Raises:
        HomeError: The database belongs to another program, or a newer version has migrated it.
    """
    (application,) = connection.execute("pragma application_id").fetchone()
    (version,) = connection.execute("pragma user_version").fetchone()
    (objects,) = connection.execute("select count(*) from sqlite_master").fetchone()
    if application == 0 and objects == 0:
        return False
    if application != APPLICATION_ID:
        raise HomeError(
            f"The database in {home} was made by another program.",
            hint="Choose another folder as home, or move that file away.",
        )
    db = sqlite_utils.Database(connection, execute_plugins=False)
    unknown = [each.name for each in _migrations.applied(db) if each.name not in _SCRIPTS]
    if version > len(_SCRIPTS) or unknown:
        found = ", ".join([f"schema {version}, {len(_SCRIPTS)} is supported", *unknown])
        raise HomeError(
            f"The home {home} is from a newer version of personalpeft ({found}).",
            hint="Update personalpeft, or choose another home.",
        )
    pending = {step.name for step in _migrations.pending(db)}
    return not (pending & _NEEDED_TO_READ if to_read else pending)


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the pending migrations. Call it inside a write transaction."""
    connection.execute(f"pragma application_id={APPLICATION_ID}")
    _migrations.apply(sqlite_utils.Database(connection, execute_plugins=False))
    connection.execute(f"pragma user_version={len(_SCRIPTS)}")
