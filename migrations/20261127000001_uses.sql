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
    query        jsonb not null,                        -- what dataset_members reads (20261127000003)
    created_by   text not null,                         -- label of that key
    created_at   timestamptz not null default clock_timestamp(),
    trajectories bigint not null,                       -- how many it selected then
    generations  bigint not null,                       -- how many they have together
    digest       bytea not null,                        -- BLAKE3 of their ids in ascending order, 16 bytes each
    constraint dataset_pkey primary key (policy, name, version),
    constraint dataset_version check (version >= 1)
);
alter table dataset enable row level security;

-- The next version of a name. The role `control` sees only versions that keys of the caller's tenant made.
create function next_dataset_version(policy_name text, dataset_name text) returns integer
language sql stable as $$
    select coalesce(max(version), 0) + 1 from dataset where policy = policy_name and name = dataset_name
$$;

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

-- Whose rows an exported file may show now.
create function dataset_tenants(policy_name text) returns text[]
language sql stable as $$ select consenting_tenants(policy_name) $$;

-- The role `control` does not see the table of consents. Both functions show only numbers and names of tenants, so they run with
-- the owner's rights. `grant_database_rights` says who may call them.
do $$
declare
    signature text;
begin
    foreach signature in array array['next_dataset_version(text, text)', 'dataset_tenants(text)'] loop
        execute format('alter function %s security definer', signature);
        execute format('alter function %s set search_path = %I, pg_temp', signature, current_schema());
        execute format('revoke execute on function %s from public', signature);
    end loop;
end
$$;
