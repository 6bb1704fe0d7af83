-- Expiry in small steps, so that it works beside long readers and on 10⁹ generations. Written by the crate `ingest` alone.
--
-- A week goes in this order. New generations of the week are refused. Its generations are counted, in slices. One short
-- transaction stores the counts, raises the horizon and drops the partition. Then everything below the horizon is deleted:
-- partitions of `trajectory` by drop, rows of other tables in batches of their own transactions.
--
-- `feedback`, `retraction`, `episode_end` and `event_key` are not partitioned by time. Their keys must be unique over all
-- time, and readers look them up by target, so every lookup would search every week.

-- How a generation's facts make its disposition: what training decided (`kind`) wins over what the horizon decided.
create function disposition_of(kind text, closed boolean, censor_code text) returns text
language sql immutable parallel safe as $$
    select case
        when kind is not null then kind
        when not closed then 'open'
        when censor_code is not null then 'censored'
        else 'queued'
    end
$$;

-- Trajectories get the partitions of generations. The existing rows stay in their table, which becomes the partition of
-- everything before a Monday that is at least a day away. This reads the table once and rewrites nothing.
do $$
declare
    monday timestamptz := (date_trunc('week', (now() + interval '1 day') at time zone 'utc') + interval '7 days') at time zone 'utc';
    bound uuid := first_generation_id(monday);
    older text := 'trajectory_before_' || to_char(monday at time zone 'utc', 'IYYY"w"IW');
begin
    drop trigger trajectory_notify on trajectory;
    execute format('alter table trajectory rename to %I', older);
    execute format('alter table %I rename constraint trajectory_pkey to %I', older, older || '_pkey');
    execute format('create table trajectory (like %I including defaults including constraints) partition by range (generation_id)',
                   older);
    alter table trajectory add constraint trajectory_pkey primary key (generation_id);
    create table trajectory_default partition of trajectory default;
    -- Ids from the future, of a producer whose clock was ahead.
    execute format('with moved as (delete from %I where generation_id >= %L returning *) insert into trajectory select * from moved',
                   older, bound);
    execute format('alter table trajectory attach partition %I for values from (minvalue) to (%L)', older, bound);
end
$$;
create trigger trajectory_notify after insert on trajectory
    for each statement execute function notify_of_change();      -- the realtime run waits for these

create or replace view ledger as
    select g.id as generation_id,
           g.tenant_id,
           g.policy,
           g.purpose,
           g.arm,
           g.version,
           g.sampled_at,
           disposition_of(d.kind, t.generation_id is not null, t.censor_code) as disposition,
           coalesce(d.code, t.censor_code) as code,
           d.run_id,
           d.step,
           t.reward
    from generation g
    left join trajectory t on t.generation_id = g.id
    left join disposition d on d.generation_id = g.id;

-- A partition needs a lock on the whole table. Behind a long reader it gives up, because everybody else would wait behind it.
create or replace function create_generation_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    if to_regclass(quote_ident(name)) is not null then
        return;
    end if;
    perform set_config('lock_timeout', '2s', true);
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of generation for values from (%L) to (%L)', name, from_id, until_id);
end
$$;

-- Like create_generation_partition, for trajectories.
create function create_trajectory_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    if to_regclass(quote_ident(name)) is not null then
        return;
    end if;
    perform set_config('lock_timeout', '2s', true);
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of trajectory for values from (%L) to (%L)', name, from_id, until_id);
exception
    -- The week overlaps the partition of everything before.
    when invalid_object_definition then null;
end
$$;

-- Everything below `until_id` that `clean` covers has been deleted; null: nothing yet.
alter table generation_horizon add column cleaned_id uuid;

-- The week that is about to go. At most one row.
create table generation_expiry (
    one         boolean primary key default true,
    until_id    uuid not null,                          -- generations below are refused
    begun_at    timestamptz not null default clock_timestamp(),
    counted_id  uuid not null default '00000000-0000-0000-0000-000000000000',   -- `expiring_generation` counts up to here
    constraint generation_expiry_one check (one)
);

-- The counts of that week so far. They become rows of `expired_generation` in the transaction that drops the week.
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

-- Refuses new generations below `until` from now on: those of this partition, and those without a partition. Nothing then
-- opens in a week that is about to go.
create function refuse_generations(partition_name text, until uuid) returns void
language plpgsql as $$
declare
    leaf text;
begin
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

-- Undoes refuse_generations, down to the horizon.
create function accept_generations(partition_name text) returns void
language plpgsql as $$
declare
    kept uuid := (select h.until_id from generation_horizon h);
begin
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

-- A horizon that exists already also refuses from now on.
do $$
declare
    kept uuid := (select h.until_id from generation_horizon h);
begin
    if kept is not null then
        execute format('alter table generation_default add constraint generation_refused check (id >= %L) not valid', kept);
    end if;
end
$$;

-- Children of a generation: those that need its context.
create index generation_by_parent on generation (parent_id) where prompt_prefix_len > 0;

-- What keeps generations below `until`: 'open' (their horizon has not passed), 'queued' (a run that has not ended may train on
-- them) or 'parent' (a later turn that is open or queued shares their context, directly or through other turns). Null: nothing.
-- What a rollout says of its run must be so: the run has a rollout of this id. Otherwise anybody could keep every week.
-- Only looks at generations from the horizon to `until`, and at turns that continue them in a later week. Turns that were
-- stored after the week began to be refused do not count; otherwise a client could keep it for ever.
create or replace function generations_needed(until uuid) returns text
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
    execute format('drop table if exists %I', partition_name);
end
$$;

drop function expire_generations(text, uuid, timestamptz);

-- Deletion by age walks along these. Events of one transaction share their time, so the indexes are small. (BRIN indexes
-- ended up selecting everything, once new rows had filled the space of deleted ones.)
drop index event_key_by_received_at;
create index event_key_by_received_at on event_key (received_at);
drop index episode_end_by_stored_at;
create index episode_end_by_stored_at on episode_end (stored_at);
create index retraction_by_stored_at on retraction (stored_at);

-- The first signals of a metric about a target, without reading its other feedback.
create index feedback_by_generation_metric on feedback (generation_id, tenant_id, metric_name, given_at, id) where generation_id is not null;
create index feedback_by_episode_metric on feedback (episode_id, tenant_id, metric_name, given_at, id) where episode_id is not null;
drop index feedback_by_generation;
drop index feedback_by_episode;
