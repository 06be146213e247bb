-- The key of each user's files, wrapped by the home's key. Empty in a home that is not encrypted. Not chained.
create table data_key (
    id text primary key,
    user text not null,
    wrapped blob not null
) strict, without rowid;
create index data_key_by_user on data_key (user);
