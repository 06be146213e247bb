-- The live stack is read for every request; the first index covers it. The second finds whether any
-- revision names a file.
create index layer_live on layer (user, born, name, head, weight);
create index revision_by_file on revision (digest);
