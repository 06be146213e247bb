-- Whether layers may be trained on a user's new signals, where a signal does not say. Not chained: a
-- setting, as the weight and scope of a layer.
alter table user add column trains integer not null default 1 check (trains in (0, 1));
