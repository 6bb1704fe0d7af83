-- What rollouts may use of each engine, and what it is used for. Written by the crate `serving` alone. New tables, so nothing is
-- read or rewritten.

-- One minute of one engine. A replica forecasts from these after a restart. Kept for `serve.tide.history_days`.
create table tide_minute (
    policy                   text not null,
    replica                  text not null,
    engine                   smallint not null,          -- its number behind a gateway; 0: the replica's own
    minute                   timestamptz not null,
    process                  uuid not null,              -- that counted; after a restart within a minute there are two rows
    slots                    integer not null,
    seconds                  double precision not null,  -- that were looked at
    production_slot_seconds  double precision not null,  -- one slot for one second is one
    production_peak          integer not null,           -- slots that production needed at once, those that waited included
    expected                 double precision,           -- of that, the forecast; null: no day was known
    lendable_slot_seconds    double precision not null,
    lent_slot_seconds        double precision not null,  -- that rollouts and evaluations used
    slot_limit               integer,                    -- the last decision; null: no limit
    whole                    boolean not null,
    why                      text,
    taken_back               bigint not null,            -- how often a sequence lost its slot
    taking_back_ms_max       double precision not null,  -- since the process began
    alone                    jsonb not null,             -- what users felt without rollouts: counts, and sums in milliseconds
    beside                   jsonb not null,             -- and beside rollouts
    constraint tide_minute_pkey primary key (policy, replica, engine, minute, process)
);
create index tide_minute_by_minute on tide_minute (policy, minute);

-- What an engine was used for on one day (UTC): the basis of what each run cost. Kept.
create table engine_use (
    policy          text not null,
    replica         text not null,
    engine          smallint not null,
    process         uuid not null,
    day             date not null,
    work            text not null,
    run_id          uuid,                                -- null: of no run
    sampled         bigint not null,                     -- tokens
    read            bigint not null,                     -- tokens of prompts
    read_again      bigint not null,                     -- tokens that were read again after a slot was taken back
    thrown_away     bigint not null,                     -- tokens that were sampled for nothing
    slot_seconds    double precision not null,
    engine_seconds  double precision not null,
    constraint engine_use_key unique nulls not distinct (policy, replica, engine, process, day, work, run_id),
    constraint engine_use_work check (work in ('production', 'rollout', 'evaluation'))
);
create index engine_use_by_day on engine_use (policy, day);

-- The control role writes both for the replicas. Adds to what `grant_database_rights` grants, whatever else that is by now.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(before, '[''control'', ''insert'', ''task, policy, tenant''],',
        '[''control'', ''insert'', ''task, policy, tenant''],
        [''control'', ''select, insert, update, delete'', ''tide_minute''],
        [''control'', ''select, insert, update'', ''engine_use''],');
begin
    if after = before then
        raise exception 'grant_database_rights does not name what control may insert';
    end if;
    execute after;
end
$$;

select grant_database_rights();
