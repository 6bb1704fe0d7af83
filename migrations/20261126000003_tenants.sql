-- whose a policy is, and which other tenants let it train on their data: written by the crate `edge` alone.

create table policy (
    name        text primary key,                       -- policy.name of the configuration
    tenant_id   text not null references tenant (id),   -- the owner: decides about runs and releases, and always consents
    created_at  timestamptz not null default clock_timestamp()
);

-- A tenant's consent that a policy is trained on what it logs. A withdrawn one stays; consenting again is another row.
create table tenant_consent (
    id            uuid primary key default uuidv7(),
    policy        text not null references policy (name),
    tenant_id     text not null references tenant (id),
    given_by      text not null,                        -- an API key's label, or the user of the command line
    given_at      timestamptz not null default clock_timestamp(),
    withdrawn_by  text,
    withdrawn_at  timestamptz,                          -- set once, never cleared
    constraint tenant_consent_withdrawn check ((withdrawn_at is null) = (withdrawn_by is null))
);
create unique index tenant_consent_in_force on tenant_consent (policy, tenant_id) where withdrawn_at is null;

-- The tenants whose data a policy may be trained on. The only place that says so: everything that trains asks here.
create function consenting_tenants(policy_name text) returns text[]
language sql stable parallel safe as $$
    select coalesce(array_agg(allowed.tenant_id), '{}')
    from (
        select p.tenant_id from policy p where p.name = policy_name
        union
        select c.tenant_id from tenant_consent c where c.policy = policy_name and c.withdrawn_at is null
    ) allowed
$$;

-- Whether a tenant let a policy be trained on what was stored at a time.
create function consented(policy_name text, tenant text, at timestamptz) returns boolean
language sql stable parallel safe as $$
    select exists (select from policy p where p.name = policy_name and p.tenant_id = tenant)
        or exists (select from tenant_consent c
                   where c.policy = policy_name and c.tenant_id = tenant
                     and c.given_at <= at and (c.withdrawn_at is null or at < c.withdrawn_at))
$$;
create index tenant_consent_by_tenant on tenant_consent (policy, tenant_id);

-- Every policy so far belongs to `default`, the only tenant that the configuration named. `springtide tenant transfer`
-- hands it over.
insert into policy (name, tenant_id)
select known.policy, 'default'
from (
    select policy from line union select policy from version union select policy from run union select policy from assignment
) known;

-- Tenants that have sent events were trained on, and stay so until they withdraw: a consent for each, to every policy. The
-- primary key of `event_key` begins with the tenant, so this reads a few pages for each tenant, not the table. Tenants that
-- only ever wrote to the log themselves have no row yet.
with recursive sender (tenant_id) as (
    (select tenant_id from event_key order by tenant_id limit 1)
    union all
    select (select later.tenant_id from event_key later where later.tenant_id > sender.tenant_id order by later.tenant_id limit 1)
    from sender where sender.tenant_id is not null
)
insert into tenant (id) select tenant_id from sender where tenant_id is not null on conflict do nothing;

insert into tenant_consent (policy, tenant_id, given_by)
select policy.name, tenant.id, 'the upgrade'
from policy, tenant
where tenant.id <> policy.tenant_id and exists (select from event_key where event_key.tenant_id = tenant.id);

-- An id of feedback or of a retraction is unique in its tenant only. Ids that are derived from an `Idempotency-Key` can be
-- computed by others; before, whoever stored one first kept everybody else's event out. (The id of a generation stays unique
-- over all tenants, because everything about a generation names it by its id alone.) Each builds an index: a minute or so for
-- 10⁸ rows. The id comes first, because look-ups know it and not always the tenant.
alter table feedback drop constraint feedback_pkey, add constraint feedback_pkey primary key (id, tenant_id);
alter table retraction drop constraint retraction_pkey, add constraint retraction_pkey primary key (id, tenant_id);
