-- Null is the default scope of a layer of its kind.
alter table layer add column scope text check (scope in ('always', 'near', 'never'));
