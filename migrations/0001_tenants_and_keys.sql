-- Tenants, policies and consents, API keys, samplers, and the audit. Written by the crate `edge`.

create table tenant (
    id          text primary key,  -- short name such as 'default'; part of each event's identity
    created_at  timestamptz not null default now()
);

insert into tenant (id) values ('default');

create table policy (
    name        text primary key,  -- policy.name of the configuration
    -- The owner. It decides about runs and releases, and always consents.
    tenant_id   text not null references tenant (id),
    created_at  timestamptz not null default clock_timestamp()
);

-- A tenant's consent that a policy is trained on what the tenant logs. A withdrawn consent keeps
-- its row; consenting again adds another row.
create table tenant_consent (
    id            uuid primary key default uuidv7(),
    policy        text not null references policy (name),
    tenant_id     text not null references tenant (id),
    given_by      text not null,  -- label of an API key, or the user of the command line
    given_at      timestamptz not null default clock_timestamp(),
    withdrawn_by  text,
    withdrawn_at  timestamptz,    -- set once, never cleared
    constraint tenant_consent_withdrawn check ((withdrawn_at is null) = (withdrawn_by is null))
);
create unique index tenant_consent_in_force on tenant_consent (policy, tenant_id) where withdrawn_at is null;
create index tenant_consent_by_tenant on tenant_consent (policy, tenant_id);

-- The tenants whose data a policy may be trained on now. Everything that trains asks here.
create function consenting_tenants(policy_name text) returns text[]
language sql stable parallel safe as $$
    select coalesce(array_agg(allowed.tenant_id), '{}')
    from (
        select p.tenant_id from policy p where p.name = policy_name
        union
        select c.tenant_id from tenant_consent c where c.policy = policy_name and c.withdrawn_at is null
    ) allowed
$$;

-- Whether a tenant consented when something was stored.
create function consented(policy_name text, tenant text, at timestamptz) returns boolean
language sql stable parallel safe as $$
    select exists (select from policy p where p.name = policy_name and p.tenant_id = tenant)
        or exists (select from tenant_consent c
                   where c.policy = policy_name and c.tenant_id = tenant
                     and c.given_at <= at and (c.withdrawn_at is null or at < c.withdrawn_at))
$$;

-- Users that were erased. What arrives of them later is unlinked, too.
create table erasure (
    id            uuid primary key default uuidv7(),
    tenant_id     text not null,
    user_digest   bytea not null,  -- as user_digest() makes it: the user's key itself is not kept
    requested_by  text not null,   -- label of the key
    erased_at     timestamptz not null default clock_timestamp(),  -- when it was registered
    finished      boolean not null default false,  -- whether nothing is left of what was stored before
    receipt       jsonb not null default '{}',  -- what erase_user counted
    constraint erasure_user unique (tenant_id, user_digest)
);

create function user_digest(tenant text, user_key text) returns bytea
language sql immutable parallel safe as $$
    select sha256(convert_to(concat(length(tenant), ':', tenant, user_key), 'UTF8'))
$$;

create table api_key (
    id           uuid primary key default uuidv7(),
    tenant_id    text not null references tenant (id),
    -- What the key may do: edge::auth::Role; 'custom': see `scopes`.
    role         text not null,
    -- BLAKE3 of the secret; the secret itself is never stored.
    digest       bytea not null,
    label        text not null default '',  -- for people: who holds it
    created_at   timestamptz not null default now(),
    revoked_at   timestamptz,               -- set once, never cleared
    scopes       text[],                    -- edge::auth::Scope; null: what the role may do
    expires_at   timestamptz,               -- null: never
    created_by   text,                      -- who made it; null: not known
    last_used    timestamptz,               -- to the hour
    -- The only replica that it may report for; null: any that is free.
    replica      text,
    -- The first of the keys that it replaces by rotation; null: itself.
    lineage      uuid,
    -- What each process lets through. Null: auth.limits.key_requests_per_second.
    requests_per_second  integer,
    constraint api_key_role check (role in ('serving', 'research', 'release', 'admin', 'custom')),
    constraint api_key_scopes check ((role = 'custom') = (scopes is not null)),
    constraint api_key_requests_per_second check (requests_per_second > 0),
    constraint api_key_digest_unique unique (digest)
);

-- One row. Each change of a key raises `revision`. A process compares it with the revision of the
-- keys that it holds in memory. The time of last use does not count as a change.
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
    after insert or delete or update of id, tenant_id, role, digest, label, revoked_at, scopes, expires_at, replica, lineage,
        requests_per_second
    on api_key for each statement execute function raise_api_key_revision();
create trigger api_key_emptied after truncate on api_key
    for each statement execute function raise_api_key_revision();

-- A process whose generations may be trained on.
create table sampler (
    id          text primary key,  -- BLAKE3 of the public key, hexadecimal; generations name it
    public_key  bytea not null,    -- Ed25519
    name        text not null,     -- what `generation.replica` must be
    policy      text,              -- the only policy it samples; null: any policy
    created_at  timestamptz not null default clock_timestamp(),
    expires_at  timestamptz,       -- null: never
    revoked_at  timestamptz,       -- set once, never cleared
    constraint sampler_public_key check (octet_length(public_key) = 32)
);

-- Who changed what, in order. `hash` is the BLAKE3 of the row and of the row before. So nobody can
-- change, remove or insert a row unnoticed (`springtide audit verify`). edge::audit defines the
-- exact bytes.
create table audit (
    id        bigint primary key,        -- 1, 2, 3, … without gaps
    at        timestamptz not null,
    key_id    uuid,                      -- API key of the caller; null: none was needed
    actor     text not null,             -- label of that key, or the user of the command line
    tenant    text not null,
    action    text not null,             -- such as 'key.create'
    subject   text not null,             -- what was changed: an id or a name
    detail    text not null default '',  -- what it was changed to
    reason    text not null default '',  -- why, in the words of the actor
    previous  bytea not null,            -- hash of the row before; 32 zero bytes for the first
    hash      bytea not null,
    constraint audit_previous_unique unique (previous)
);
-- For `springtide audit list --subject`, and for the newest row about each run, which `springtide
-- audit verify` compares with the tables.
create index audit_by_subject on audit (subject, id);

create function refuse_change_of_audit() returns trigger
language plpgsql as $$
begin
    raise exception 'the table audit is append-only' using errcode = 'restrict_violation';
end
$$;
create trigger audit_append_only before update or delete or truncate on audit
    for each statement execute function refuse_change_of_audit();
