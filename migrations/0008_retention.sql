-- Weeks of generations and trajectories: creating them, and deleting them when they are old.
-- Written by the crate `ingest`; the trainer deletes its dispositions itself.
--
-- A week goes in this order. New generations of the week are refused. Its generations are counted,
-- in slices. One short transaction stores the counts, raises the horizon and drops the partition.
-- Then everything below the horizon is deleted: partitions of `trajectory` by drop, rows of other
-- tables in batches of their own transactions. So it works beside long readers and on 10⁹
-- generations.
--
-- `feedback`, `retraction`, `episode_end` and `event_key` are not partitioned by time. Their keys
-- must be unique over all time, and readers look them up by target, so every lookup would search
-- every week.

-- Generations whose rows are gone, by what had become of them. With these the ledger adds up over
-- all time.
create table expired_generation (
    until_id     uuid not null,  -- every id below it is gone; of the partition that went
    tenant_id    text not null,
    policy       text not null,
    purpose      text not null,
    arm          text not null,
    day          date not null,  -- UTC, on which they were sampled
    disposition  text not null,  -- as in `ledger`
    code         text not null,  -- empty: none
    generations  bigint not null,
    expired_at   timestamptz not null default now(),
    constraint expired_generation_pkey primary key (until_id, tenant_id, policy, purpose, arm, day, disposition, code)
);

-- From which id on generations are kept. No row before the first week has gone, then one; it rises.
create table generation_horizon (
    one         boolean primary key default true,
    until_id    uuid not null,
    cleaned_id  uuid,           -- other tables are cleaned below this id; null: not yet
    constraint generation_horizon_one check (one)
);

-- The week that is about to go. At most one row.
create table generation_expiry (
    one         boolean primary key default true,
    until_id    uuid not null,  -- generations below are refused
    begun_at    timestamptz not null default clock_timestamp(),
    -- `expiring_generation` counts up to here.
    counted_id  uuid not null default '00000000-0000-0000-0000-000000000000',
    constraint generation_expiry_one check (one)
);

-- The counts of that week so far. They become rows of `expired_generation` in the transaction that
-- drops the week.
create table expiring_generation (
    tenant_id    text not null,
    policy       text not null,
    purpose      text not null,
    arm          text not null,
    day          date not null,
    disposition  text not null,
    code         text not null,
    generations  bigint not null,
    constraint expiring_generation_pkey primary key (tenant_id, policy, purpose, arm, day, disposition, code)
);

-- These functions run with the owner's rights, so they change no table but weeks of `parent`.
create function check_partition_name(partition_name text, parent text) returns void
language plpgsql immutable as $$
begin
    if partition_name !~ ('^' || parent || '_[0-9]{4}w[0-9]{2}$') then
        raise exception '% is no week of %', partition_name, parent using errcode = 'insufficient_privilege';
    end if;
end
$$;

-- Creates the partition for the ids in [from_id, until_id). Asking again is harmless. It fails if
-- the default partition has rows of that range; they stay there. It needs a lock on the whole
-- table: behind a long reader it gives up, because everybody else would wait behind it.
create function create_generation_partition(name text, from_id uuid, until_id uuid) returns void
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

-- The same for trajectories.
create function create_trajectory_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    if to_regclass(quote_ident(name)) is not null then
        return;
    end if;
    perform check_partition_name(name, 'trajectory');
    perform set_config('lock_timeout', '2s', true);
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of trajectory for values from (%L) to (%L)', name, from_id, until_id);
end
$$;

-- Refuses new generations below `until` from now on: those of this partition, and those without a
-- partition. Nothing then opens in a week that is about to go.
create function refuse_generations(partition_name text, until uuid) returns void
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
                                       add constraint generation_refused
                                           check (id >= %L or untrainable is not distinct from ''erased'') not valid', leaf, until);
    end loop;
    if not exists (select from generation_expiry e where e.until_id = until) then
        delete from expiring_generation;
        delete from generation_expiry;
        insert into generation_expiry (until_id) values (until);
    end if;
end
$$;

-- Undoes refuse_generations, down to the horizon.
create function accept_generations(partition_name text) returns void
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
        execute format('alter table generation_default add constraint generation_refused
                            check (id >= %L or untrainable is not distinct from ''erased'') not valid', kept);
    end if;
    delete from expiring_generation;
    delete from generation_expiry;
end
$$;

-- What keeps generations below `until`: 'open' (their horizon has not passed), 'queued' (a run that
-- has not ended may train on them) or 'parent' (a later turn that is open or queued shares their
-- context, directly or through other turns). Null: nothing.
--
-- A rollout keeps its week only if its run has a rollout of this id. Otherwise anybody could keep
-- every week. It looks only at generations from the horizon to `until`, and at turns that continue
-- them in a later week. Turns that were stored after the week began to be refused do not count;
-- otherwise a client could keep it for ever.
create function generations_needed(until uuid) returns text
language plpgsql stable as $$
declare
    kept uuid := coalesce((select h.until_id from generation_horizon h), '00000000-0000-0000-0000-000000000000');
    begun_at timestamptz := coalesce((select e.begun_at from generation_expiry e where e.until_id = until), 'infinity');
    training boolean := exists (select from run where finished_at is null);
begin
    if exists (select from open_generation o where o.generation_id >= kept and o.generation_id < until) then
        return 'open';
    end if;
    if training and exists (
        select from trajectory t
        where t.generation_id >= kept and t.generation_id < until and t.reward is not null
          and not exists (select from disposition d
                          where d.generation_id = t.generation_id and d.generation_id >= kept and d.generation_id < until)
          and exists (select from generation g
                      join run r on r.finished_at is null
                                and case g.purpose
                                        when 'rollout' then r.id = g.run_id and r.kind = 'grpo' and exists (
                                            select from rollout o where o.id = g.episode_id and o.run_id = r.id)
                                        when 'production' then r.kind = 'realtime' and r.policy = g.policy
                                    end
                      where g.id = t.generation_id)
    ) then
        return 'queued';
    end if;
    if exists (
        with recursive later as (
            select g.id, g.tenant_id, g.policy, g.purpose, g.run_id, g.episode_id
            from generation g
            join generation p on p.id = g.parent_id and p.tenant_id = g.tenant_id
            where g.prompt_prefix_len > 0 and g.parent_id >= kept and g.parent_id < until
              and g.id >= until and g.stored_at < begun_at
            union
            select g.id, g.tenant_id, g.policy, g.purpose, g.run_id, g.episode_id
            from later l
            join generation g on g.parent_id = l.id and g.tenant_id = l.tenant_id
            where g.prompt_prefix_len > 0 and g.stored_at < begun_at
        )
        select from later l
        left join trajectory t on t.generation_id = l.id
        where case
                  when t.generation_id is null then exists (select from open_generation o where o.generation_id = l.id)
                  else t.reward is not null
                       and not exists (select from disposition d where d.generation_id = l.id)
                       and exists (select from run r where r.finished_at is null
                                   and case l.purpose
                                           when 'rollout' then r.id = l.run_id and r.kind = 'grpo' and exists (
                                               select from rollout o where o.id = l.episode_id and o.run_id = r.id)
                                           when 'production' then r.kind = 'realtime' and r.policy = l.policy
                                       end)
              end
    ) then
        return 'parent';
    end if;
    return null;
end
$$;

-- Drops the week whose generations have been counted. Returns how many they were.
create function drop_generations(partition_name text, until uuid) returns bigint
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

-- Drops a partition of trajectories that lies below the horizon.
create function drop_trajectories(partition_name text) returns void
language plpgsql as $$
begin
    perform check_partition_name(partition_name, 'trajectory');
    execute format('drop table if exists %I', partition_name);
end
$$;
