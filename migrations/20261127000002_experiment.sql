-- the arms of the experiment as rows: who divides users how, since which assignment, by whom and why.
--
-- Until now the arms were those of the configuration of `control`. On an existing database nothing is filled in: the release
-- loop writes the first row from the configuration when it starts, without a salt, so that users stay where they are unless
-- the weights changed. The table is empty and small, so the migration takes no time.

-- Written by the crate `serving` alone. No row changes or goes. The row with the highest epoch of a policy is in force.
create table experiment (
    id          uuid not null default uuidv7(),
    policy      text not null,
    epoch       bigint not null,                        -- the first assignment that divides users by it
    salt        text not null,                          -- another one draws every user's arm anew; '': none
    arms        jsonb not null,                         -- [{"alias": "learner", "weight": 0.3, "explore": 0.02}, …], in order
    source      text not null,                          -- 'configuration' gives way to a changed configuration; 'request' does not
    actor       text not null,                          -- the API key's label, or the role that read the configuration
    reason      text not null,
    created_at  timestamptz not null default clock_timestamp(),
    constraint experiment_pkey primary key (id),
    constraint experiment_epoch unique (policy, epoch),
    constraint experiment_source check (source in ('configuration', 'request'))
);
