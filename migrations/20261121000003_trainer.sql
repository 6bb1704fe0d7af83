-- how policies improve: written by the crate `trainer` alone.

-- Serial numbers of versions: unique in every policy, rising, gaps allowed (a crashed step leaves one).
create sequence version_serial;

create table run (
    id            uuid primary key default uuidv7(),
    kind          text not null,
    policy        text not null,
    line          text not null,                        -- the line this run writes to; one writer per line
    status        text not null,
    reason        text,                                 -- why it is paused, failed or cancelled
    config        jsonb not null,                       -- as asked for, defaults filled in
    base_version  bigint,                               -- the version it started from
    steps_done    bigint not null default 0,
    steps_total   bigint,                               -- null: runs until cancelled
    fence         bigint not null default 0,            -- rises with every executor; a commit with an older one is refused
    requested     text,                                 -- 'pause', 'resume', 'cancel': what a person asked for, not yet done
    created_at    timestamptz not null default now(),
    started_at    timestamptz,
    finished_at   timestamptz,
    constraint run_kind check (kind in ('realtime', 'grpo', 'sft', 'dpo', 'kto', 'evaluate')),
    constraint run_status check (status in ('validating_files', 'queued', 'running', 'pausing', 'paused', 'succeeded', 'failed', 'cancelled')),
    constraint run_requested check (requested in ('pause', 'resume', 'cancel'))
);
create unique index run_one_realtime_per_line on run (policy, line) where kind = 'realtime';

-- What happened to a run, in words, for people: append-only.
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

-- One optimiser update. Its row, the dispositions, the version and the head of the line are one transaction: the commit.
create table step (
    run_id          uuid not null references run (id),
    step            bigint not null,                    -- 1, 2, …
    version         bigint not null,                    -- the version it made
    parent          bigint not null,
    cohort_digest   bytea not null,                     -- BLAKE3 of the sorted generation ids it trained on
    metrics         jsonb not null,                     -- loss, gradient norm, KL, parity, mismatch, timings
    checkpoint_key  text not null,                      -- object: fp32 master, optimiser moments, RNG, cursor
    committed_at    timestamptz not null default now(),
    constraint step_pkey primary key (run_id, step)
);

create table version (
    policy        text not null,
    serial        bigint not null,
    root          bytea not null,                       -- root digest of all canonical bytes (policy::image)
    parent        bigint,                               -- null: an imported base
    line          text not null,
    branch        integer not null,                     -- of the line, at the time it was made
    run_id        uuid,                                 -- null: imported by hand
    step          bigint,
    manifest_key  text not null,                        -- object key of the signed manifest
    delta_bytes   bigint,                               -- size of the delta from its parent; null: none
    image_bytes   bigint not null,                      -- canonical bytes of the whole version
    created_at    timestamptz not null default now(),
    constraint version_pkey primary key (policy, serial)
);

-- A named sequence of versions with a head.
create table line (
    policy      text not null,
    line        text not null,
    head        bigint not null,
    branch      integer not null default 0,             -- rises when the line is re-based; versions of older branches are history
    updated_at  timestamptz not null default now(),
    constraint line_pkey primary key (policy, line),
    constraint line_head foreign key (policy, head) references version (policy, serial)
);

-- What became of a generation, as far as training decided it. Append-only; exactly one per generation.
create table disposition (
    generation_id  uuid primary key,
    kind           text not null,
    code           text,                                -- why it was dropped, e.g. 'stale', 'zero_variance_group'
    run_id         uuid,
    step           bigint,
    decided_at     timestamptz not null default now(),
    constraint disposition_kind check (kind in ('trained', 'dropped', 'held_out', 'erased')),
    constraint disposition_trained check (kind <> 'trained' or (run_id is not null and step is not null)),
    constraint disposition_dropped check (kind <> 'dropped' or code is not null)
);
create index disposition_by_step on disposition (run_id, step) where kind = 'trained';

-- Expected reward per class of request, with what the next step starts from.
create table baseline (
    run_id  uuid not null references run (id),
    class   text not null,
    step    bigint not null,                            -- the step after which this value holds
    value   double precision not null,
    weight  double precision not null,                  -- how many rewards it has seen
    constraint baseline_pkey primary key (run_id, class, step)
);

-- The tasks of an offline run, as given.
create table task (
    run_id  uuid not null references run (id),
    id      text not null,
    prompt  text not null,
    answer  text not null,                              -- what the grader compares with
    constraint task_pkey primary key (run_id, id)
);
