-- Runs, their steps, and the versions that they make. Written by the crate `trainer`.

-- Serial numbers of versions: unique in each policy, rising. A crashed step leaves a gap.
create sequence version_serial;

create table run (
    id            uuid primary key default uuidv7(),
    kind          text not null,
    policy        text not null,
    line          text not null,   -- the line this run writes to; one writer per line
    status        text not null,
    reason        text,            -- why it is paused, failed or cancelled
    config        jsonb not null,  -- as asked for, with defaults filled in
    base_version  bigint,          -- the version it started from
    steps_done    bigint not null default 0,
    steps_total   bigint,          -- null: it runs until cancelled
    fence         bigint not null default 0,  -- rises with each executor; older ones may not commit
    requested     text,            -- 'pause', 'resume' or 'cancel': asked for, not done yet
    created_at    timestamptz not null default now(),
    started_at    timestamptz,
    finished_at   timestamptz,
    -- What an evaluation measured, or where an export lies. Null until the run has succeeded.
    result        jsonb,
    -- The run of which this one is the next occurrence (`config.schedule.repeats`). Each run has
    -- one next occurrence at most.
    recurs_from   uuid,
    constraint run_kind check (kind in ('realtime', 'grpo', 'sft', 'dpo', 'kto', 'evaluate', 'export')),
    constraint run_status check (status in ('validating_files', 'queued', 'running', 'pausing', 'paused', 'succeeded', 'failed', 'cancelled')),
    constraint run_requested check (requested in ('pause', 'resume', 'cancel')),
    constraint run_recurs_from foreign key (recurs_from) references run (id),
    constraint run_recurs_once unique (recurs_from)
);
create unique index run_one_realtime_per_line on run (policy, line) where kind = 'realtime';

-- What happened to a run, in words for people. Append-only.
create table run_event (
    id       uuid primary key default uuidv7(),
    run_id   uuid not null references run (id),
    at       timestamptz not null default now(),
    level    text not null,
    message  text not null,
    data     jsonb not null default '{}',
    constraint run_event_level check (level in ('info', 'warn', 'error'))
);
create index run_event_by_run on run_event (run_id, id);

-- One optimiser update. Its row, the dispositions, the version and the head of the line are written
-- in one transaction: the commit.
create table step (
    run_id            uuid not null references run (id),
    step              bigint not null,  -- 1, 2, …
    version           bigint not null,  -- the version it made
    parent            bigint not null,
    cohort_digest     bytea not null,   -- BLAKE3 of the sorted ids of the generations it trained on
    metrics           jsonb not null,   -- loss, gradient norm, KL, parity, mismatch, timings
    checkpoint_key    text not null,    -- object: fp32 master, optimizer moments, RNG, cursor
    committed_at      timestamptz not null default now(),
    -- BLAKE3 of the run state under checkpoint_key: its record, weights and moments. The policy
    -- store is not trusted, so a run continues from nothing else.
    run_state_digest  bytea not null,
    constraint step_pkey primary key (run_id, step),
    constraint step_run_state_digest check (octet_length(run_state_digest) = 32)
);
-- Pages ask for steps by time.
create index step_by_committed_at on step (committed_at);

-- A version that a run is about to publish. The run writes the row, fenced, before the manifest;
-- the commit of the step deletes the rows of the run. After a crash in between, only a manifest
-- with exactly these bytes is committed. Otherwise a thief of the trainer's key could write a
-- manifest that looks like a step of a run.
create table published_intent (
    policy            text not null,
    serial            bigint not null,  -- the serial that its manifest has
    run_id            uuid not null references run (id),
    step              bigint not null,  -- the step that makes it
    fence             bigint not null,  -- of the executor that wrote the row
    manifest_digest   bytea not null,   -- BLAKE3 of the manifest's exact bytes
    run_state_digest  bytea not null,   -- as in `step`
    created_at        timestamptz not null default now(),
    constraint published_intent_pkey primary key (policy, serial),
    constraint published_intent_digests check (octet_length(manifest_digest) = 32 and octet_length(run_state_digest) = 32)
);
create index published_intent_by_run on published_intent (run_id, step, serial);

create table version (
    policy        text not null,
    serial        bigint not null,
    root          bytea not null,    -- root digest of all canonical bytes
    parent        bigint,            -- null: an imported base
    line          text not null,
    branch        integer not null,  -- of the line, when it was made
    run_id        uuid,              -- null: imported by hand
    step          bigint,
    manifest_key  text not null,     -- object key of the signed manifest
    delta_bytes   bigint,            -- size of the delta from its parent; null: none
    image_bytes   bigint not null,   -- canonical bytes of the whole version
    created_at    timestamptz not null default now(),
    constraint version_pkey primary key (policy, serial)
);

-- A named sequence of versions with a head.
create table line (
    policy      text not null,
    line        text not null,
    head        bigint not null,
    -- Rises when the line is re-based; older branches are history.
    branch      integer not null default 0,
    updated_at  timestamptz not null default now(),
    constraint line_pkey primary key (policy, line),
    constraint line_head foreign key (policy, head) references version (policy, serial)
);
-- The release loop waits for these.
create trigger line_notify after insert or update on line
    for each statement execute function notify_of_change();

-- What became of a generation, as far as training decided it. Append-only; one per generation at
-- most.
create table disposition (
    generation_id  uuid primary key,
    kind           text not null,
    code           text,        -- why it was dropped: 'stale', 'zero_variance_group', …
    run_id         uuid,
    step           bigint,
    decided_at     timestamptz not null default now(),
    constraint disposition_kind check (kind in ('trained', 'dropped', 'held_out', 'erased')),
    constraint disposition_trained check (kind <> 'trained' or (run_id is not null and step is not null)),
    constraint disposition_dropped check (kind <> 'dropped' or code is not null)
);
create index disposition_by_step on disposition (run_id, step) where kind = 'trained';

-- How a generation's facts make its disposition: what training decided (`kind`) wins over what the
-- horizon decided.
create function disposition_of(kind text, closed boolean, censor_code text) returns text
language sql immutable parallel safe as $$
    select case
        when kind is not null then kind
        when not closed then 'open'
        when censor_code is not null then 'censored'
        else 'queued'
    end
$$;

-- Each generation and its disposition: exactly one, always. Each crate appends its own facts; this
-- view joins them, with the rights of the caller. Before any decision, a generation is open.
create view ledger with (security_invoker = true) as
    select g.id as generation_id,
           g.tenant_id,
           g.policy,
           g.purpose,
           g.arm,
           g.version,
           g.sampled_at,
           disposition_of(d.kind, t.generation_id is not null, t.censor_code) as disposition,
           coalesce(d.code, t.censor_code) as code,
           d.run_id,
           d.step,
           t.reward
    from generation g
    left join trajectory t on t.generation_id = g.id
    left join disposition d on d.generation_id = g.id;

-- What runs used a trajectory for. `disposition` says what became of a generation in the realtime
-- ledger; any number of runs may use a closed trajectory. Realtime and GRPO runs write this with
-- the disposition `trained`, offline runs over a dataset write it alone. No row changes. A row goes
-- when its generation has expired.
create table trajectory_use (
    generation_id  uuid not null,
    run_id         uuid not null,
    step           bigint not null,  -- of the run; runs that train nothing have one, 1
    purpose        text not null,
    used_at        timestamptz not null default now(),
    constraint trajectory_use_pkey primary key (generation_id, run_id, step),
    constraint trajectory_use_purpose check (purpose in ('trained', 'evaluated', 'exported'))
);
-- Which trajectories a version was trained on, also by runs that write no disposition.
create index trajectory_use_by_step on trajectory_use (run_id, step) where purpose = 'trained';

-- Gives trajectories of tenants that do not consent their reason, because the trainer's user does
-- not see them. Returns how many.
create function drop_without_consent(policy_name text, run uuid, oldest uuid, count_max integer) returns bigint
language sql as $$
    with dropped as (
        insert into disposition (generation_id, kind, code, run_id)
        select g.id, 'dropped', 'tenant_without_consent', run
        from generation g
        join trajectory t on t.generation_id = g.id
        where g.policy = policy_name
          and g.id >= oldest
          and t.reward is not null
          and g.tenant_id <> all ((select consenting_tenants(policy_name))::text[])
          and not exists (select from disposition d where d.generation_id = g.id)
        order by g.id
        limit count_max
        on conflict (generation_id) do nothing
        returning 1
    )
    select count(*) from dropped
$$;

-- Of the trajectories that a run's newest trained generations belong to: how many come from each
-- user of each surface, and how many of their trained tokens, the heaviest first. An episode is one
-- trajectory, and counts for each user of its turns.
create function trained_share(run uuid, newest integer)
returns table (tenant_id text, user_key text, surface text, trajectories bigint, share double precision,
               tokens bigint, token_share double precision)
language sql stable as $$
    with latest as (
        select d.generation_id, d.step from disposition d
        where d.run_id = run and d.kind = 'trained'
        order by d.step desc
        limit newest
    ),
    of_users as (
        select g.tenant_id, g.user_key, g.surface,
               count(distinct (latest.step, coalesce(t.episode_id, g.id))) as trajectories,
               sum(case when g.train_mask is null then cardinality(g.token_ids)
                        else cardinality(array_positions(g.train_mask, true)) end)::bigint as tokens
        from latest
        join generation g on g.id = latest.generation_id
        join trajectory t on t.generation_id = g.id
        group by g.tenant_id, g.user_key, g.surface
    ),
    shares as (
        select o.*, o.trajectories::double precision / sum(o.trajectories) over () as share,
               o.tokens::double precision / greatest(1, sum(o.tokens) over ()) as token_share
        from of_users o
    )
    select s.tenant_id, s.user_key, s.surface, s.trajectories, s.share, s.tokens, s.token_share
    from shares s
    order by greatest(s.share, s.token_share) desc, s.tenant_id, s.user_key, s.surface
$$;

-- Expected reward per class of request, which the next step starts from.
create table baseline (
    run_id  uuid not null references run (id),
    class   text not null,
    step    bigint not null,            -- the step after which this value holds
    value   double precision not null,
    weight  double precision not null,  -- how many rewards it has seen
    constraint baseline_pkey primary key (run_id, class, step)
);

-- Tests that watch one run's figures on one surface. One row is read and written at a time.
create table monitor (
    run_id      uuid not null references run (id),
    surface     text not null,
    last_id     uuid not null,   -- last generation of the last trajectory that was taken
    state       jsonb not null,  -- figure → evidence::change::Change
    figures     jsonb not null,  -- figure → levels, evidence and alarm, for people
    updated_at  timestamptz not null default clock_timestamp(),
    constraint monitor_pkey primary key (run_id, surface)
);

-- Cohorts of runs whose steps a trainer outside computes. The process `train` fills them and commits
-- their steps. The trainer's API makes the changes that an outside trainer asks for.
create table cohort (
    id             uuid primary key default uuidv7(),
    run_id         uuid not null references run (id),
    step           bigint not null,   -- the step that is to be made of it
    parent         bigint not null,   -- the version that the step begins from
    -- filling:   trajectories join
    -- full:      waits for a trainer, or a trainer works on it
    -- submitted: its trainer has committed it, and `train` verifies the weights
    -- committed: it is a step
    -- dropped:   it went back to the queue: the line has moved, or a person has ended the run
    state          text not null default 'filling',
    -- What the step needs besides the weights: baselines, notes, what was measured while it filled.
    ready          jsonb,
    fence          bigint not null default 0,  -- rises with each lease; lower ones are refused
    holder         text,              -- label of the key that leased it
    client_token   text,              -- of the lease: the same token gets the same lease again
    lease_seconds  integer,
    leased_at      timestamptz,       -- when the present lease began
    expires_at     timestamptz,
    submission     jsonb,             -- what its trainer has committed, and its token
    refusal        text,              -- why the last submission was refused, or the cohort dropped
    refusals       integer not null default 0,  -- submissions that were refused
    swept          boolean not null default false,  -- its files are deleted
    created_at     timestamptz not null default now(),
    filled_at      timestamptz,
    submitted_at   timestamptz,
    constraint cohort_state check (state in ('filling', 'full', 'submitted', 'committed', 'dropped'))
);
-- A run makes one step at a time.
create unique index cohort_open on cohort (run_id) where state in ('filling', 'full', 'submitted');
create index cohort_by_step on cohort (run_id, step);
create index cohort_unswept on cohort (id) where not swept;

-- No cohort outlives its run.
create function drop_cohorts_of_ended_run() returns trigger language plpgsql as $$
begin
    update cohort set state = 'dropped', refusal = 'the run is ' || new.status
    where run_id = new.id and state in ('filling', 'full', 'submitted');
    return null;
end
$$;
create trigger run_drops_cohorts after update of finished_at on run
    for each row when (old.finished_at is null and new.finished_at is not null)
    execute function drop_cohorts_of_ended_run();

-- The samples of a cohort, in files of the store of payloads. The rows go with the cohort.
create table cohort_part (
    cohort_id     uuid not null references cohort (id),
    part          integer not null,   -- 0, 1, …
    generations   uuid[] not null,
    trajectories  integer not null,
    tokens        bigint not null,    -- sampled ones
    payload       jsonb not null,     -- digest and size of the file
    constraint cohort_part_pkey primary key (cohort_id, part)
);
