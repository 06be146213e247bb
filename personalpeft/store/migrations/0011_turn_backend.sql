-- The backend that generated the reply; null where an earlier version wrote the turn.
alter table turn add column backend text;
