-- Stacks that were published of each user, by folder. A former one is in the folder until the next publication there. Not chained.
create table publication (
    user text not null references user (id),
    folder text not null,
    digest text not null,
    is_current integer not null check (is_current in (0, 1)),
    primary key (user, folder, digest)
) strict, without rowid;
create unique index publication_current on publication (user, folder) where is_current = 1;
create index publication_in_folder on publication (folder, digest) where is_current = 1;

-- Notes of earlier versions are deleted too.
create table deletion (
    id integer primary key,
    user text not null,
    kind text not null check (kind in ('blob', 'sessions', 'journal', 'note')),
    name text not null
) strict;
insert into deletion select id, user, kind, name from pending_deletion;
drop table pending_deletion;
alter table deletion rename to pending_deletion;
create index pending_deletion_by_user on pending_deletion (user, id);
