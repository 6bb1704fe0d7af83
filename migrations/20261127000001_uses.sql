-- what runs used a trajectory for, and named datasets.
--
-- `disposition` says what became of a generation in the realtime ledger: one row at most, and it stays. Any number of runs may
-- use a closed trajectory. Each use is a row here: realtime and GRPO runs write it with the disposition `trained`, offline runs
-- over a dataset write it alone.
--
-- Cost on an existing database: the roles are stopped during a migration. The lock below only makes sure of it: a trainer that
-- still runs waits with its commits until the end. Filling `trajectory_use` reads `disposition` once and writes 80 bytes of
-- table and 65 bytes of indexes for each trained generation: 20 s and 1.4 GB for 10⁷. Everything else takes milliseconds.

-- Written by the crate `trainer` alone. No row changes. Rows go when their generation has expired.
create table trajectory_use (
    generation_id  uuid not null,
    run_id         uuid not null,
    step           bigint not null,                     -- of the run; runs that train nothing have one, 1
    purpose        text not null,
    used_at        timestamptz not null default now(),
    constraint trajectory_use_purpose check (purpose in ('trained', 'evaluated', 'exported'))
);

do $$
begin
    lock table disposition in share mode;
    insert into trajectory_use (generation_id, run_id, step, purpose, used_at)
    select generation_id, run_id, step, 'trained', decided_at
    from disposition where kind = 'trained';
end
$$;

-- The indexes come after the rows: that is faster.
alter table trajectory_use add constraint trajectory_use_pkey primary key (generation_id, run_id, step);
-- Which trajectories a version was trained on, also by runs that write no disposition.
create index trajectory_use_by_step on trajectory_use (run_id, step) where purpose = 'trained';

-- A named query over closed trajectories. A version of it never changes. Written by the crate `trainer` alone.
create table dataset (
    policy       text not null,
    name         text not null,
    version      integer not null,                      -- 1, 2, … of this name
    tenant_id    text not null,                         -- of the key that made it
    query        jsonb not null,                        -- what dataset_members reads
    created_by   text not null,                         -- label of that key
    created_at   timestamptz not null default clock_timestamp(),
    generations  bigint not null,                       -- how many it selected then
    digest       bytea not null,                        -- BLAKE3 of their ids in ascending order, 16 bytes each
    constraint dataset_pkey primary key (policy, name, version),
    constraint dataset_version check (version >= 1)
);

-- Runs over a dataset. `result`: what an evaluation measured, or where an export lies; null until the run has succeeded.
alter table run
    add column result jsonb,
    drop constraint run_kind,
    add constraint run_kind check (kind in ('realtime', 'grpo', 'sft', 'dpo', 'kto', 'evaluate', 'export'));

-- Whether a user is in the share of a split. A user is a pair of tenant and key. The same salt gives the same users. Null: no
-- split, so everybody is. The user's place in [0, 1) is the first four bytes of a SHA-256, as a big-endian number, over 2³².
create function user_in_split(split jsonb, tenant text, user_key text) returns boolean
language sql stable parallel safe as $$
    select split is null
        or coalesce((split ->> 'rest')::boolean, false) <> (
            ('x' || left(encode(sha256(convert_to(
                concat(length(split ->> 'salt'), ':', split ->> 'salt', length(tenant), ':', tenant, user_key), 'UTF8')), 'hex'), 8)
            )::bit(32)::bigint < (split ->> 'share')::double precision * 4294967296)
$$;

-- The generations that a dataset's query selects, by id, as far as they are still stored. `consents`: whether their tenant lets
-- the policy be trained on them now. Who logged a generation as not to be trained on is in no dataset.
--
-- `only_consenting` is for a new dataset. Later its query has `tenants`, `closed_before` and `last_id` of that moment, so that
-- nothing is added: not a tenant that consents today, not a trajectory that has closed since, not one that takes the place of an
-- expired one below the limit.
create function dataset_members(policy_name text, query jsonb, only_consenting boolean)
returns table (generation_id uuid, tenant_id text, consents boolean)
language sql stable as $$
    select g.id, g.tenant_id, g.tenant_id = any (consenting.tenants)
    from (select consenting_tenants(policy_name) as tenants offset 0) consenting
    cross join generation g
    join trajectory t on t.generation_id = g.id
    where g.policy = policy_name
      and g.consent
      and t.reward is not null
      and (not only_consenting or g.tenant_id = any (consenting.tenants))
      and t.closed_at < (query ->> 'closed_before')::timestamptz
      and (query ->> 'last_id' is null or g.id <= (query ->> 'last_id')::uuid)
      and (query -> 'tenants' is null or query -> 'tenants' ? g.tenant_id)
      and (query -> 'surfaces' is null or query -> 'surfaces' ? g.surface)
      and (query -> 'arms' is null or query -> 'arms' ? g.arm)
      and (query -> 'purposes' is null or query -> 'purposes' ? g.purpose)
      and (query -> 'signals' is null or query -> 'signals' ? t.signal)
      and (query ->> 'version_min' is null or g.version >= (query ->> 'version_min')::bigint)
      and (query ->> 'version_max' is null or g.version <= (query ->> 'version_max')::bigint)
      and (query ->> 'reward_min' is null or t.reward >= (query ->> 'reward_min')::double precision)
      and (query ->> 'reward_max' is null or t.reward <= (query ->> 'reward_max')::double precision)
      -- Of both tables, so that only the weeks of this time are read.
      and g.id >= first_generation_id(coalesce((query ->> 'sampled_from')::timestamptz, 'epoch'))
      and t.generation_id >= first_generation_id(coalesce((query ->> 'sampled_from')::timestamptz, 'epoch'))
      and g.id < first_generation_id(coalesce((query ->> 'sampled_until')::timestamptz, '9999-12-31'))
      and t.generation_id < first_generation_id(coalesce((query ->> 'sampled_until')::timestamptz, '9999-12-31'))
      and user_in_split(query -> 'split', g.tenant_id, g.user_key)
    order by g.id
    limit (query ->> 'limit')::bigint
$$;

-- Whose rows an exported file may show now.
create function dataset_tenants(policy_name text) returns text[]
language sql stable as $$ select consenting_tenants(policy_name) $$;

-- The role `control` does not see the keys of users, which a query needs, nor the table of consents. Both functions show only ids
-- and names of tenants, so they run with the owner's rights. `grant_database_rights` says who may call them.
do $$
declare
    signature text;
begin
    foreach signature in array array['dataset_members(text, jsonb, boolean)', 'dataset_tenants(text)'] loop
        execute format('alter function %s security definer', signature);
        execute format('alter function %s set search_path = %I, pg_temp', signature, current_schema());
        execute format('revoke execute on function %s from public', signature);
    end loop;
end
$$;
