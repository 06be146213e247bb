-- Facts are learned from the turns that looked them up, which are few among all turns.
create index turn_looked_up on turn (user, seq) where used <> '[]';
