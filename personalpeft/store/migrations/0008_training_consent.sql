-- A retraction whose purpose is 'training' withdraws a signal from training alone; null is a whole
-- retraction. A signal can have one of each.
create table retraction_by_purpose (
    user text not null,
    signal text not null,
    seq integer not null,
    at text not null,
    purpose text check (purpose = 'training'),
    primary key (user, seq),
    foreign key (user, seq) references entry (user, seq),
    foreign key (user, signal) references signal (user, id)
) strict;
insert into retraction_by_purpose select user, signal, seq, at, null from retraction;
drop table retraction;
alter table retraction_by_purpose rename to retraction;
create unique index retraction_by_signal on retraction (user, signal, coalesce(purpose, ''));
