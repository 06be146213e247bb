-- Why the backend of a turn served; null where an earlier version wrote the turn.
alter table turn add column backend_reason text;
