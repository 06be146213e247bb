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
