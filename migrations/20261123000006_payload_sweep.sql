-- payloads that no event ever named: the object store is looked through for them now and then. Written by the crate `ingest`
-- alone.

-- When somebody last began to. One row: of many processes one looks, and a restart looks no sooner.
create table payload_sweep (
    one       boolean primary key default true,
    begun_at  timestamptz not null,
    constraint payload_sweep_one check (one)
);
