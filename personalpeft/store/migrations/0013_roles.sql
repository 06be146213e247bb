-- Roles have the names of today. The judgements, which are chained, keep the former ones.
create table provenance_by_role (
    user text not null,
    revision text not null,
    signal text not null,
    layer text not null,
    role text not null check (role in ('trained', 'held_out')),
    primary key (user, revision, signal),
    foreign key (user, layer, revision) references revision (user, layer, id),
    foreign key (user, signal) references signal (user, id)
) strict, without rowid;
insert into provenance_by_role
    select user, revision, signal, layer, iif(role in ('train', 'trained'), 'trained', 'held_out')
    from provenance;
drop table provenance;
alter table provenance_by_role rename to provenance;
create index provenance_by_layer on provenance (user, layer, role, signal);
create index provenance_by_signal on provenance (user, signal);
