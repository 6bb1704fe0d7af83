-- What replicas report: what they serve, how long swaps took, and what rollouts may use of their
-- engines. Written by the crate `serving`, in the role `control`.

-- What each replica last said of itself.
create table replica (
    id           text primary key,
    cluster      text not null,
    policy       text not null,
    address      text not null,
    epoch        bigint not null,  -- the assignment it has applied
    resident     jsonb not null,   -- [{"version": 7, "root": "…", "aliases": ["champion"]}, …]
    ready        boolean not null,
    reported_at  timestamptz not null default now(),
    -- The lineage of the keys that report for this replica. Null: it reports without a key.
    owner        uuid
);

-- One version becoming resident on one replica: where the time went.
create table swap (
    id         uuid primary key default uuidv7(),
    replica    text not null,
    policy     text not null,
    version    bigint not null,
    epoch      bigint not null,
    fetch_ms   double precision not null,
    verify_ms  double precision not null,  -- decode the delta, digest the result
    stage_ms   double precision not null,  -- build the network beside the serving one
    pause_ms   double precision not null,  -- the engine did nothing else for this long
    at         timestamptz not null default now()
);

-- One minute of one engine. A replica forecasts from these after a restart. Kept for
-- `serve.tide.history_days`.
create table tide_minute (
    policy                   text not null,
    replica                  text not null,
    -- Its number behind a gateway; 0: the replica's own.
    engine                   smallint not null,
    minute                   timestamptz not null,
    -- The one that counted; a restart within a minute makes two rows.
    process                  uuid not null,
    slots                    integer not null,
    seconds                  double precision not null,  -- that were observed
    production_slot_seconds  double precision not null,  -- one slot for one second is one
    -- Slots that production needed at once, with those that waited.
    production_peak          integer not null,
    expected                 double precision,  -- the forecast of that; null: no day was known
    lendable_slot_seconds    double precision not null,
    lent_slot_seconds        double precision not null,  -- that rollouts and evaluations used
    slot_limit               integer,  -- the last decision; null: no limit
    whole                    boolean not null,
    why                      text,
    taken_back               bigint not null,  -- how often a sequence lost its slot
    taking_back_ms_max       double precision not null,  -- since the process began
    -- Latency without rollouts: counts, and sums in milliseconds.
    alone                    jsonb not null,
    beside                   jsonb not null,  -- and beside rollouts
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
    run_id          uuid,             -- null: of no run
    sampled         bigint not null,  -- tokens
    read            bigint not null,  -- tokens of prompts
    read_again      bigint not null,  -- tokens that were read again after a slot was taken back
    thrown_away     bigint not null,  -- tokens that were sampled for nothing
    slot_seconds    double precision not null,
    engine_seconds  double precision not null,
    constraint engine_use_key unique nulls not distinct (policy, replica, engine, process, day, work, run_id),
    constraint engine_use_work check (work in ('production', 'rollout', 'evaluation'))
);
create index engine_use_by_day on engine_use (policy, day);
