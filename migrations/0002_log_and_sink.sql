-- How events get from the log into the tables: duplicates, offsets and payloads. Written by the
-- crate `ingest`.

-- The only place that finds duplicates. Tenant, source, kind and id identify an event: a
-- generation, the end of its episode and its feedback may have the same id.
create table event_key (
    tenant_id    text not null,
    source       text not null,   -- who produced it, such as 'springtide/serve/replica-1'
    event_id     text not null,
    kind         text not null,   -- 'generation', 'feedback', 'retraction' or 'episode_end'
    digest       bytea not null,  -- BLAKE3 of the canonical body: same id, other body = conflict
    received_at  timestamptz not null default now(),
    constraint event_key_pkey primary key (tenant_id, source, event_id, kind)
);
-- Retention deletes by age. Events of one transaction share their time, so the index is small.
create index event_key_by_received_at on event_key (received_at);

-- How far each partition of the log is stored. One transaction writes rows and offsets. The fence
-- stops a stale owner.
create table consumer_offset (
    consumer      text not null,  -- 'sink'
    cluster_id    text not null,  -- the broker's own id: a recreated cluster is another cluster
    topic         text not null,
    partition     integer not null,
    next_offset   bigint not null default 0,  -- the first offset that is not in the tables yet
    fence         bigint not null default 0,  -- rises with each new owner; older ones are refused
    -- Every event that the log took before this moment is in the tables.
    caught_up_to  timestamptz,
    updated_at    timestamptz not null default now(),
    constraint consumer_offset_pkey primary key (consumer, cluster_id, topic, partition)
);

-- What a generation keeps in the object store instead of in its row. `generation.payload_digest`
-- repeats the digest of 'prompt'.
create table payload_reference (
    generation_id  uuid not null,
    -- 'prompt': token ids; 'experts': expert ids per token and layer.
    kind           text not null,
    tenant_id      text not null,   -- whose payload; the object's key contains it too
    digest         bytea not null,  -- BLAKE3 of the bytes, and their name in the store
    size_bytes     bigint not null,
    media_type     text not null,   -- how to read them
    constraint payload_reference_pkey primary key (generation_id, kind),
    constraint payload_reference_kind check (kind in ('prompt', 'experts'))
);
-- Does anything still refer to an object?
create index payload_reference_by_digest on payload_reference (digest);

-- Payloads without any reference since their last generation expired. A job deletes the objects.
create table payload_unreferenced (
    tenant_id  text not null,
    digest     bytea not null,
    since      timestamptz not null default now(),
    constraint payload_unreferenced_pkey primary key (tenant_id, digest)
);

-- When a process last began to search the object store for payloads that no event has named. One
-- row: only one of many processes searches, and a restart does not make it search sooner.
create table payload_sweep (
    one       boolean primary key default true,
    begun_at  timestamptz not null,
    constraint payload_sweep_one check (one)
);
