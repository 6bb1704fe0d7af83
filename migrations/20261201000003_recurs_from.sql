-- runs that come again.
--
-- Cost on an existing database: adding the column and its empty index takes milliseconds for the few rows of `run`.

-- The run of which this one is the next occurrence (`config.schedule.repeats`). Each run has one next occurrence at most.
alter table run
    add column recurs_from uuid,
    add constraint run_recurs_from foreign key (recurs_from) references run (id),
    add constraint run_recurs_once unique (recurs_from);
