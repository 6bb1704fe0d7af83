-- what ties files in the policy store to the rows of the run that wrote them. The store is not trusted: whoever writes to it
-- could change a run state, and a thief of the trainer's key could write a manifest that looks like a step of a run.

-- A version that a run is about to publish. Its row is written, fenced, before its manifest; the step's commit deletes the
-- rows of the run. After a crash in between, only a manifest with exactly these bytes is committed. Written by the crate
-- `trainer` alone.
create table published_intent (
    policy            text not null,
    serial            bigint not null,                   -- the serial that its manifest has
    run_id            uuid not null references run (id),
    step              bigint not null,                   -- the step that makes it
    fence             bigint not null,                   -- of the executor that wrote the row
    manifest_digest   bytea not null,                    -- BLAKE3 of the manifest's exact bytes: root, parent, objects, cohort
    run_state_digest  bytea not null,                    -- as in `step`
    created_at        timestamptz not null default now(),
    constraint published_intent_pkey primary key (policy, serial),
    constraint published_intent_digests check (octet_length(manifest_digest) = 32 and octet_length(run_state_digest) = 32)
);
create index published_intent_by_run on published_intent (run_id, step, serial);

alter table step
    -- BLAKE3 of the run state under checkpoint_key: its record, weights and moments. A run continues from nothing else.
    -- Null: the step is from before this column, and its run state is checked against its version's weights alone.
    add column run_state_digest bytea,
    add constraint step_run_state_digest check (octet_length(run_state_digest) = 32);
