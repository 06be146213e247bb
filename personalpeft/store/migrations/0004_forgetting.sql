-- A tombstone replaces the content of an erased entry. The other table lists what is still to be deleted
-- from files. It is not chained, and it is empty except during an erasure.
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
