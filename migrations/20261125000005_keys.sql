-- API keys that expire, are replaced and are limited to scopes; and the audit, a hash chain of what people and keys changed.
-- Written by the crate `edge`, except for `replica.owner`.

alter table api_key
    drop constraint api_key_role,
    add column scopes      text[],                      -- what the key may do, see edge::auth::Scope; null: what its role may do
    add column expires_at  timestamptz,                 -- null: never
    add column created_by  text,                        -- who made it; null: not known
    add column last_used   timestamptz,                 -- to the hour
    add column replica     text,                        -- the only replica that it may report for; null: any that is free
    add column lineage     uuid,                        -- the first of the keys that it replaces by rotation; null: itself
    add constraint api_key_role check (role in ('serving', 'research', 'release', 'admin', 'custom')),
    add constraint api_key_scopes check ((role = 'custom') = (scopes is not null));

-- One row. Every change of a key raises `revision`, so that a process knows whether the keys that it holds in memory are
-- still those of the table. The time of last use is no such change.
create table api_key_revision (
    one       boolean primary key default true,
    revision  bigint not null,
    constraint api_key_revision_one check (one)
);
insert into api_key_revision (revision) values (1);

create function raise_api_key_revision() returns trigger
language plpgsql as $$
begin
    update api_key_revision set revision = revision + 1;
    return null;
end
$$;
create trigger api_key_changed
    after insert or delete or update of id, tenant_id, role, digest, label, revoked_at, scopes, expires_at, replica, lineage
    on api_key for each statement execute function raise_api_key_revision();
create trigger api_key_emptied after truncate on api_key
    for each statement execute function raise_api_key_revision();

-- Who changed what, in order. `hash` is the BLAKE3 of the row and of the row before, so a row cannot be changed, removed or
-- inserted unnoticed (`springtide audit verify`). See edge::audit for the exact bytes.
create table audit (
    id        bigint primary key,                       -- 1, 2, 3, … without gaps
    at        timestamptz not null,
    key_id    uuid,                                     -- API key of the caller; null: none was needed
    actor     text not null,                            -- label of that key, or the user of the command line
    tenant    text not null,
    action    text not null,                            -- such as 'key.create'
    subject   text not null,                            -- what was changed: an id or a name
    detail    text not null default '',                 -- what it was changed to
    reason    text not null default '',                 -- why, in the words of the actor
    previous  bytea not null,                           -- hash of the row before; 32 zero bytes for the first
    hash      bytea not null,
    constraint audit_previous_unique unique (previous)
);

create function refuse_change_of_audit() returns trigger
language plpgsql as $$
begin
    raise exception 'the table audit is append-only' using errcode = 'restrict_violation';
end
$$;
create trigger audit_append_only before update or delete or truncate on audit
    for each statement execute function refuse_change_of_audit();

-- The lineage of the keys that report for this replica. Null: nobody's yet, as for reports without a key.
alter table replica add column owner uuid;
