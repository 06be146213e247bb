alter table errand rename to pending_deletion;
alter table pending_deletion rename column number to id;
alter table pending_deletion rename column what to kind;
drop index errand_by_user;
create index pending_deletion_by_user on pending_deletion (user, id);
