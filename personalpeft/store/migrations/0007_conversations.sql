-- Null where an earlier version wrote the turn; '' for a turn that is in no conversation.
alter table turn add column conversation text;
alter table turn add column previous text;
create index turn_in_conversation on turn (user, conversation, seq) where conversation > '';
-- Message lists of clients without conversation ids name the turn before theirs by its reply.
create index turn_by_reply on turn (user, substr(reply, 1, 40));
