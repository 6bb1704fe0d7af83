-- what happened: immutable facts, written by the crate `ingest` alone.

-- The one place that knows duplicates. An event is identified by (tenant, source, kind, id): a generation and the end of
-- its episode may have the same id, and feedback that of its generation.
create table event_key (
    tenant_id    text not null,
    source       text not null,                         -- who produced the event, e.g. 'springtide/serve/replica-1'
    event_id     text not null,
    kind         text not null,                         -- 'generation', 'feedback', 'retraction' or 'episode_end'
    digest       bytea not null,                        -- BLAKE3 of the canonical body: same id, other body = conflict
    received_at  timestamptz not null default now(),
    constraint event_key_pkey primary key (tenant_id, source, event_id, kind)
);

-- One sampled completion (one choice). Range-partitioned by its UUIDv7, that is, by the time it was sampled.
create table generation (
    id                 uuid not null,                   -- UUIDv7; its first 48 bits are the unix time in milliseconds
    tenant_id          text not null,
    policy             text not null,
    version            bigint not null,                 -- serial of the version that sampled the LAST token
    version_oldest     bigint not null,                 -- serial of the oldest version of any sampled token (staleness counts from it)
    version_spans      jsonb not null,                  -- [[version, token count], …] in token order; sums to the sampled length
    root               bytea not null,                  -- root digest of `version`
    line               text not null,
    replica            text not null,
    purpose            text not null,
    run_id             uuid,                            -- rollouts and evaluations: the run that asked
    task_id            text,
    group_id           text,
    surface            text not null,
    episode_id         uuid not null,
    segment            integer not null default 0,      -- context of the episode; a summary opens the next one
    turn               integer not null default 0,
    parent_id          uuid,                            -- generation whose prompt + tokens this prompt extends
    user_key           text not null,                   -- the caller's opaque key of the user; never a name
    arm                text not null,                   -- alias that answered, e.g. 'champion'
    arm_probability    real not null,                   -- probability with which this user was put in that arm
    prompt_prefix_len  integer not null default 0,      -- tokens shared with the parent, not repeated in prompt_ids
    prompt_prefix_hash bytea,                           -- BLAKE3 of the shared prefix, u32 little-endian ids
    prompt_ids         integer[] not null,              -- prompt token ids after the shared prefix
    -- of prompt_ids: whether two are equal shows without reading them
    prompt_hash        bigint not null generated always as (hash_array_extended(prompt_ids, 0)) stored,
    token_ids          integer[] not null,              -- sampled token ids, the stop token included
    logprobs           real[] not null,                 -- nats; log-probability of each sampled token under the distribution sampled from
    train_mask         boolean[],                       -- null: every sampled token is trained on
    payload_digest     bytea,                           -- BLAKE3 of a payload kept in the object store (long contexts, experts)
    temperature        real not null,
    top_p              real not null,
    seed               bigint,
    finish_reason      text not null,
    declined           boolean not null,                -- the policy chose to show nothing
    shown              boolean,                         -- null: the surface did not say
    consent            boolean not null default true,   -- false: logged, never trained on
    sampled_at         timestamptz not null,            -- event time, the UUIDv7's
    stored_at          timestamptz not null default now(),
    constraint generation_pkey primary key (id),
    constraint generation_purpose check (purpose in ('production', 'rollout', 'evaluation')),
    constraint generation_lengths check (cardinality(token_ids) = cardinality(logprobs))
) partition by range (id);

-- Rows whose week has no partition of its own yet land here; ingest creates partitions ahead of time.
create table generation_default partition of generation default;

-- The partition for the ids in [from_id, until_id). Asking again is harmless; rows of that range that already lie in the
-- default partition make it fail, and stay where they are.
create function create_generation_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of generation for values from (%L) to (%L)', name, from_id, until_id);
end
$$;

create index generation_by_version on generation (policy, version, id);
create index generation_rollout on generation (run_id, id) where purpose = 'rollout';  -- those that nothing was decided about
create index generation_by_episode on generation (episode_id, id);  -- the newest of an episode, which may have any number

-- What still waits for its horizon. A row appears with its generation and goes with its trajectory, in one transaction each.
create table open_generation (
    generation_id  uuid primary key,
    surface        text not null,
    closes_at      timestamptz not null                 -- event time at which the horizon has passed
);
create index open_generation_by_closes_at on open_generation (closes_at);

-- A signal about a generation or an episode. No foreign key: feedback may arrive before its generation.
create table feedback (
    id             uuid primary key,                    -- UUIDv7
    tenant_id      text not null,
    generation_id  uuid,
    episode_id     uuid,
    metric_name    text not null,
    value_bool     boolean,
    value_float    double precision,
    value_text     text,                                -- comment, demonstration
    tags           jsonb not null default '{}',
    given_at       timestamptz not null,                -- event time
    stored_at      timestamptz not null default now(),
    late           boolean not null default false,      -- arrived after its trajectory closed: kept, counted, not used
    orphaned_at    timestamptz,                         -- its generation never came; a copy went to the DLQ
    constraint feedback_one_target check ((generation_id is null) <> (episode_id is null)),
    constraint feedback_one_value check (num_nonnulls(value_bool, value_float, value_text) = 1)
);
create index feedback_by_generation on feedback (generation_id) where generation_id is not null;
create index feedback_by_episode on feedback (episode_id) where episode_id is not null;
create index feedback_by_stored_at on feedback (stored_at);    -- the sweep for orphans moves along it

-- How a surface turns signals into a reward. A changed definition is a new version; old rows stay.
create table reward_definition (
    surface     text not null,
    version     integer not null,
    definition  jsonb not null,                         -- ingest::reward::Definition
    created_at  timestamptz not null default now(),
    constraint reward_definition_pkey primary key (surface, version)
);

-- A generation whose horizon has passed: rewarded, or censored with a code. Exactly one per generation.
create table trajectory (
    generation_id      uuid primary key,
    surface            text not null,
    reward_definition  integer not null,                -- version of the definition that scored it
    reward             double precision,                -- null iff censored
    censor_code        text,                            -- null iff rewarded, e.g. 'no_feedback'
    signal             text,                            -- what decided it: 'accept', 'reject', 'decline', …
    feedback_at        timestamptz,                     -- event time of the deciding feedback
    closed_at          timestamptz not null default now(),
    constraint trajectory_rewarded_or_censored check ((reward is null) <> (censor_code is null))
);

-- Where each partition stands. Rows and offsets are written in one transaction; the fence stops a stale owner.
create table consumer_offset (
    consumer     text not null,                         -- 'sink'
    cluster_id   text not null,                         -- the broker's own id: a recreated cluster is another cluster
    topic        text not null,
    partition    integer not null,
    next_offset  bigint not null default 0,             -- the first offset that is not in the tables yet
    fence        bigint not null default 0,             -- rises with every new owner; a transaction with an older one is refused
    caught_up_to timestamptz,                           -- every event that the log took before this moment is in the tables
    updated_at   timestamptz not null default now(),
    constraint consumer_offset_pkey primary key (consumer, cluster_id, topic, partition)
);
