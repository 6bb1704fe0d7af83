-- a database user for each Springtide role, with the least rights, and rows that each user may see.
--
-- The owner of the tables migrates, and is what commands such as `springtide key` use. Rights are no matter of one
-- migration: `grant_database_rights` says all of them, and `springtide migrate` calls it each time.

-- Makes the users unless they exist. They belong to the whole server, so several databases may be migrated at the same time:
-- whoever is second finds them made. Without the right to make users nothing happens: `springtide migrate` says which are missing.
create function create_database_roles() returns void
language plpgsql as $$
declare
    name text;
begin
    foreach name in array array['springtide_ingest', 'springtide_serve', 'springtide_control', 'springtide_train'] loop
        continue when exists (select from pg_roles where rolname = name);
        begin
            execute format('create role %I login', name);
        exception
            when duplicate_object or unique_violation or insufficient_privilege then null;
        end;
    end loop;
end
$$;

-- What weeks of generations and trajectories are called. Functions that run with the owner's rights change no other table.
create function check_partition_name(partition_name text, parent text) returns void
language plpgsql immutable as $$
begin
    if partition_name !~ ('^' || parent || '_(before_)?[0-9]{4}w[0-9]{2}$') then
        raise exception '% is no week of %', partition_name, parent using errcode = 'insufficient_privilege';
    end if;
end
$$;

create or replace function create_generation_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    if to_regclass(quote_ident(name)) is not null then
        return;
    end if;
    perform check_partition_name(name, 'generation');
    perform set_config('lock_timeout', '2s', true);
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of generation for values from (%L) to (%L)', name, from_id, until_id);
end
$$;

create or replace function create_trajectory_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    if to_regclass(quote_ident(name)) is not null then
        return;
    end if;
    perform check_partition_name(name, 'trajectory');
    perform set_config('lock_timeout', '2s', true);
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of trajectory for values from (%L) to (%L)', name, from_id, until_id);
exception
    -- The week overlaps the partition of everything before.
    when invalid_object_definition then null;
end
$$;

create or replace function refuse_generations(partition_name text, until uuid) returns void
language plpgsql as $$
declare
    leaf text;
begin
    perform check_partition_name(partition_name, 'generation');
    foreach leaf in array array[partition_name, 'generation_default'] loop
        continue when to_regclass(quote_ident(leaf)) is null;
        continue when exists (select from pg_constraint
                              where conrelid = to_regclass(quote_ident(leaf)) and conname = 'generation_refused'
                                and position(until::text in pg_get_constraintdef(oid)) > 0);
        execute format('alter table %I drop constraint if exists generation_refused,
                                       add constraint generation_refused check (id >= %L) not valid', leaf, until);
    end loop;
    if not exists (select from generation_expiry e where e.until_id = until) then
        delete from expiring_generation;
        delete from generation_expiry;
        insert into generation_expiry (until_id) values (until);
    end if;
end
$$;

create or replace function accept_generations(partition_name text) returns void
language plpgsql as $$
declare
    kept uuid := (select h.until_id from generation_horizon h);
begin
    perform check_partition_name(partition_name, 'generation');
    if to_regclass(quote_ident(partition_name)) is not null then
        execute format('alter table %I drop constraint if exists generation_refused', partition_name);
    end if;
    alter table generation_default drop constraint if exists generation_refused;
    if kept is not null then
        execute format('alter table generation_default add constraint generation_refused check (id >= %L) not valid', kept);
    end if;
    delete from expiring_generation;
    delete from generation_expiry;
end
$$;

create or replace function drop_generations(partition_name text, until uuid) returns bigint
language plpgsql as $$
declare
    gone bigint;
begin
    perform check_partition_name(partition_name, 'generation');
    with counted as (
        delete from expiring_generation returning tenant_id, policy, purpose, arm, day, disposition, code, generations
    ),
    added as (
        insert into expired_generation (until_id, tenant_id, policy, purpose, arm, day, disposition, code, generations)
        select until, c.tenant_id, c.policy, c.purpose, c.arm, c.day, c.disposition, c.code, c.generations from counted c
        on conflict on constraint expired_generation_pkey
            do update set generations = expired_generation.generations + excluded.generations
    )
    select coalesce(sum(c.generations), 0) into gone from counted c;
    delete from generation_expiry;
    insert into generation_horizon (until_id) values (until)
    on conflict (one) do update set until_id = greatest(generation_horizon.until_id, excluded.until_id);
    -- Last, because everybody else waits for this lock.
    execute format('drop table if exists %I', partition_name);
    return gone;
end
$$;

create or replace function drop_trajectories(partition_name text) returns void
language plpgsql as $$
begin
    perform check_partition_name(partition_name, 'trajectory');
    execute format('drop table if exists %I', partition_name);
end
$$;

-- Gives trajectories of tenants that do not consent their reason. The trainer's user does not see them. Returns how many.
create function drop_without_consent(policy_name text, run uuid, oldest uuid, count_max integer) returns bigint
language sql as $$
    with dropped as (
        insert into disposition (generation_id, kind, code, run_id)
        select g.id, 'dropped', 'tenant_without_consent', run
        from generation g
        join trajectory t on t.generation_id = g.id
        where g.policy = policy_name
          and g.id >= oldest
          and t.reward is not null
          and g.tenant_id <> all ((select consenting_tenants(policy_name))::text[])
          and not exists (select from disposition d where d.generation_id = g.id)
        order by g.id
        limit count_max
        on conflict (generation_id) do nothing
        returning 1
    )
    select count(*) from dropped
$$;

-- These run with the owner's rights: users change no table's form, and the trainer sees no tenant that does not consent.
do $$
declare
    signature text;
begin
    foreach signature in array array[
        'create_generation_partition(text, uuid, uuid)', 'create_trajectory_partition(text, uuid, uuid)',
        'refuse_generations(text, uuid)', 'accept_generations(text)', 'drop_generations(text, uuid)',
        'drop_trajectories(text)', 'drop_without_consent(text, uuid, uuid, integer)'
    ] loop
        execute format('alter function %s security definer', signature);
        execute format('alter function %s set search_path = %I, pg_temp', signature, current_schema());
        execute format('revoke execute on function %s from public', signature);
    end loop;
end
$$;

-- Whoever reads the view needs the rights on its tables, and sees the rows that they show.
alter view ledger set (security_invoker = true);

-- Rows that belong to tenants. The owner of the tables sees all; everybody else only what a policy says.
alter table event_key enable row level security;
alter table generation enable row level security;
alter table feedback enable row level security;
alter table retraction enable row level security;
alter table episode_end enable row level security;
alter table payload_reference enable row level security;
alter table expired_generation enable row level security;

-- Says what each user may do. Called by `springtide migrate` each time, so that users that were made later get their rights.
create function grant_database_rights() returns void
language plpgsql as $$
declare
    user_name text;
    -- What each user may do, beside what all may: (user, rights, tables).
    rights text[][] := array[
        -- ingest: its own tables
        ['ingest', 'select, insert, update, delete',
         'event_key, generation, generation_default, open_generation, payload_reference, payload_unreferenced, payload_sweep,
          expired_generation, expiring_generation, generation_expiry, generation_horizon, feedback, retraction, episode_end,
          trajectory, consumer_offset'],
        ['ingest', 'select, insert', 'reward_definition'],
        ['ingest', 'select, insert', 'audit'],
        ['ingest', 'select', 'run, disposition, sampler'],
        -- serve
        ['serve', 'select', 'sampler'],
        -- control: what was logged without its texts and tokens
        ['control', 'select (id, tenant_id, policy, version, root, version_spans, line, arm, replica, purpose, sampled_at)', 'generation'],
        ['control', 'select', 'trajectory, disposition, expired_generation, ledger, version, line, step, alias, policy, tenant, task'],
        ['control', 'select, insert', 'assignment, release, transition, swap, run_event'],
        ['control', 'insert', 'task, policy, tenant'],
        ['control', 'select, insert, update', 'run, replica'],
        ['control', 'select, insert', 'audit'],
        -- train
        ['train', 'select', 'generation, trajectory, payload_reference, open_generation, consumer_offset, reward_definition,
          sampler, assignment, alias, generation_horizon, tenant_consent, task'],
        ['train', 'select, insert', 'step, version, baseline, run_event, policy, tenant'],
        ['train', 'select, insert, update', 'run, line'],
        ['train', 'select, insert, delete', 'disposition, published_intent'],
        ['train', 'select, insert', 'audit'],
        ['train', 'usage, select', 'sequence version_serial']
    ];
    entry text[];
    -- Tables whose rows belong to tenants.
    of_tenants text[] := array['event_key', 'generation', 'feedback', 'retraction', 'episode_end', 'payload_reference',
                               'expired_generation'];
    t text;
begin
    perform pg_advisory_xact_lock(hashtext('grant_database_rights'));
    foreach user_name in array array['springtide_ingest', 'springtide_serve', 'springtide_control', 'springtide_train'] loop
        continue when not exists (select from pg_roles where rolname = user_name);
        execute format('grant usage on schema %I to %I', current_schema(), user_name);
        execute format('revoke all on all tables in schema %I from %I', current_schema(), user_name);
        -- All know the keys of callers, and look whether the schema is theirs.
        execute format('grant select on api_key, api_key_revision to %I', user_name);
        execute format('grant update (last_used) on api_key to %I', user_name);
        if to_regclass('_sqlx_migrations') is not null then
            execute format('grant select on _sqlx_migrations to %I', user_name);
        end if;
        foreach entry slice 1 in array rights loop
            if user_name = 'springtide_' || entry[1] then
                execute format('grant %s on %s to %I', entry[2], entry[3], user_name);
            end if;
        end loop;
    end loop;

    -- What each user sees of tables with tenants. A policy that exists is kept: another version needs another name.
    foreach t in array of_tenants loop
        -- What answers a caller of ingest names the tenant and sees no other. Its jobs name none. Written so
        -- that the planner expects most rows: of a plain comparison with a setting it expects one row in 200, and then it
        -- reads a whole week to find a few generations.
        perform make_policy(t, 'ingest', 'all', 'springtide_ingest',
            $p$(length(current_setting('springtide.tenant', true)) > 0
                and tenant_id <> current_setting('springtide.tenant', true)) is not true$p$);
    end loop;
    -- Every read of control is for a request: of a tenant, or of an administrator.
    foreach t in array array['generation', 'expired_generation'] loop
        perform make_policy(t, 'control_request', 'select', 'springtide_control',
            $p$tenant_id = current_setting('springtide.tenant', true) or current_setting('springtide.all_tenants', true) = 'on'$p$);
    end loop;
    -- The trainer sees what tenants log that consent to the policy.
    perform make_policy('generation', 'train_consent', 'select', 'springtide_train',
        $p$(policy, tenant_id) in (select p.name, p.tenant_id from policy p
                                   union all
                                   select c.policy, c.tenant_id from tenant_consent c where c.withdrawn_at is null)$p$);
    perform make_policy('payload_reference', 'train_consent', 'select', 'springtide_train',
        $p$tenant_id in (select p.tenant_id from policy p
                         union all
                         select c.tenant_id from tenant_consent c where c.withdrawn_at is null)$p$);
    if exists (select from pg_roles where rolname = 'springtide_ingest') then
        grant execute on function create_generation_partition(text, uuid, uuid), create_trajectory_partition(text, uuid, uuid),
            refuse_generations(text, uuid), accept_generations(text), drop_generations(text, uuid), drop_trajectories(text)
            to springtide_ingest;
    end if;
    if exists (select from pg_roles where rolname = 'springtide_train') then
        grant execute on function drop_without_consent(text, uuid, uuid, integer) to springtide_train;
    end if;
end
$$;

-- Makes a policy unless it exists or its user does not.
create function make_policy(table_name text, policy_name text, command text, user_name text, rule text) returns void
language plpgsql as $$
begin
    if not exists (select from pg_roles where rolname = user_name)
       or exists (select from pg_policies
                  where schemaname = current_schema() and tablename = table_name and policyname = policy_name) then
        return;
    end if;
    execute format('create policy %I on %I for %s to %I using (%s)', policy_name, table_name, command, user_name, rule);
end
$$;

select create_database_roles(), grant_database_rights();
