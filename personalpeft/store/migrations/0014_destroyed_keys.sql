-- A key that is being replaced is listed too, until no file needs it.
create table deletion (
    id integer primary key,
    user text not null,
    kind text not null check (kind in ('blob', 'sessions', 'journal', 'note', 'data_key')),
    name text not null
) strict;
insert into deletion select id, user, kind, name from pending_deletion;
drop table pending_deletion;
alter table deletion rename to pending_deletion;
create index pending_deletion_by_user on pending_deletion (user, id);
