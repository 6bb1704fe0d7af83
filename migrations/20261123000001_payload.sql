-- what happened: payloads by reference, and contexts that are logged turn by turn. Written by the crate `ingest` alone.

-- What a generation keeps in the object store instead of its row. `generation.payload_digest` repeats the digest of 'prompt'.
create table payload_reference (
    generation_id  uuid not null,
    kind           text not null,                       -- 'prompt': token ids; 'experts': expert ids per token and layer
    tenant_id      text not null,                       -- whose payload; the object's key has it too
    digest         bytea not null,                      -- BLAKE3 of the bytes, and their name in the store
    size_bytes     bigint not null,
    media_type     text not null,                       -- how to read them
    constraint payload_reference_pkey primary key (generation_id, kind),
    constraint payload_reference_kind check (kind in ('prompt', 'experts'))
);
create index payload_reference_by_digest on payload_reference (digest);    -- does anything refer to it still?
