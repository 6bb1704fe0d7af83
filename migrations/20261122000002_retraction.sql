-- what happened: feedback that is taken back, and episodes that end. Written by the crate `ingest` alone.

-- Takes a feedback back, from `given_at` on: what closes before keeps it, what closes then or later is scored without it.
-- No foreign key: a retraction may arrive before its feedback, and then waits for it.
create table retraction (
    id           uuid primary key,                      -- UUIDv7
    tenant_id    text not null,
    feedback_id  uuid not null,
    reason       text not null,                         -- for people; may be empty
    given_at     timestamptz not null,                  -- event time
    stored_at    timestamptz not null default now(),
    late         boolean not null default false         -- its feedback's trajectory had closed: kept, counted, not used
);
create index retraction_by_feedback on retraction (feedback_id);

-- Nothing more will come for an episode. The earliest end counts.
create table episode_end (
    tenant_id   text not null,
    episode_id  uuid not null,
    ended_at    timestamptz not null,                   -- event time
    stored_at   timestamptz not null default now(),
    constraint episode_end_pkey primary key (tenant_id, episode_id)
);
