-- What was exported of each user and when, without its words, so that an erasure can say what remains elsewhere. Not chained.
create table export (
    id integer primary key,
    user text not null references user (id),
    at text not null,
    kind text not null check (kind in ('personal', 'peft', 'gguf', 'merged', 'learn_bundle')),
    digest text -- null: not known yet; empty: deleted by an erasure
) strict;
create index export_by_user on export (user, id);
