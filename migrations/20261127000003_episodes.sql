-- an episode is one trajectory. Columns of `trajectory` and `open_generation`, and the table `open_episode`, all written by the
-- crate `ingest` alone. At the end the rights on every table that is new since 20261126000007.
--
-- Cost on an existing database: nothing is rewritten, because the columns are null, which means what it meant before. Both tables
-- are locked for everybody (ACCESS EXCLUSIVE) until the end of this migration. So nothing here reads `trajectory`: its check
-- constraints hold for new rows at once, and 20261127000004 looks at the old ones. Two indexes read `open_generation`, which is
-- small.

-- An episode whose turns wait for their reward. Its row appears with its first open turn and goes with their trajectories, in
-- one transaction each. Sinks and closer lock this row, never the rows of its turns (ingest/src/rows/join.rs).
create table open_episode (
    episode_id      uuid not null,
    tenant_id       text not null,
    surface         text not null,                      -- of the turn that was stored first
    opened_at       timestamptz not null default now(), -- when that turn was stored
    turn_stored_at  timestamptz not null,               -- when the last turn was stored
    closes_at       timestamptz not null,               -- when to look whether it is over
    turns           integer not null default 1,         -- how many are open
    -- It takes no more turns: a turn that comes now is a stray. Then the row stays for a while after the episode has closed, so
    -- that turns of one that never ends wait for no lock.
    is_full         boolean not null default false,
    constraint open_episode_pkey primary key (episode_id, tenant_id)
);
create index open_episode_by_closes_at on open_episode (closes_at, episode_id);
alter table open_episode enable row level security;

alter table open_generation
    -- Set: the generation is a turn, and closes with this episode. `closes_at` is then the end of its own horizon, which closes
    -- nothing. Null: it is a trajectory of its own.
    add column episode_id uuid,
    -- It is a turn that its episode did not take. It closes alone, as 'late_turn'.
    add column stray boolean not null default false;
create index open_generation_by_episode on open_generation (episode_id, generation_id) where episode_id is not null;
-- The closer walks along this one. It must not meet the turns, which may wait for days.
drop index open_generation_by_closes_at;
create index open_generation_by_closes_at on open_generation (closes_at, generation_id) where episode_id is null;

alter table trajectory
    -- Null: the generation is the trajectory. Set: the trajectory is this episode of the generation's tenant. All of its turns
    -- have rows with the same reward, censor code, signal, closes_at and closed_at, written by one transaction. A turn that came
    -- after its episode had closed has null and the code 'late_turn'.
    add column episode_id uuid,
    -- How many turns the episode had when it closed. With fewer rows, retention has deleted some of it.
    add column episode_turns integer,
    -- The turn's own reward. Null: it has none.
    add column turn_reward double precision,
    add constraint trajectory_episode check ((episode_id is null) = (episode_turns is null)) not valid,
    add constraint trajectory_turn_reward check (turn_reward is null or (reward is not null and episode_id is not null)) not valid;

-- Whether turns of this episode have closed together. Feedback that comes later is late, and so are turns.
create function episode_closed(tenant text, episode uuid) returns boolean
language sql stable as $$
    select exists (
        select from trajectory t
        join generation g on g.id = t.generation_id
        where t.episode_id = episode and g.tenant_id = tenant
    )
$$;

-- Whether a dataset's query selects a generation, apart from its time. What was logged as not to be trained on is in no dataset, nor
-- what a tenant logged while it did not consent: a later consent does not bring it back.
create function dataset_selects(query jsonb, g generation, t trajectory) returns boolean
language sql stable parallel safe as $$
    select g.consent
        and consented(g.policy, g.tenant_id, g.stored_at)
        and t.reward is not null
        and t.closed_at < (query ->> 'closed_before')::timestamptz
        and (query -> 'tenants' is null or query -> 'tenants' ? g.tenant_id)
        and (query -> 'surfaces' is null or query -> 'surfaces' ? g.surface)
        and (query -> 'arms' is null or query -> 'arms' ? g.arm)
        and (query -> 'purposes' is null or query -> 'purposes' ? g.purpose)
        and (query -> 'signals' is null or query -> 'signals' ? t.signal)
        and (query ->> 'version_min' is null or g.version >= (query ->> 'version_min')::bigint)
        and (query ->> 'version_max' is null or g.version <= (query ->> 'version_max')::bigint)
        and (query ->> 'reward_min' is null or t.reward >= (query ->> 'reward_min')::double precision)
        and (query ->> 'reward_max' is null or t.reward <= (query ->> 'reward_max')::double precision)
        and user_in_split(query -> 'split', g.tenant_id, g.user_key)
$$;

-- The trajectories that a query selects among those whose last generation is from `from_id` on, before `until_id` and not after
-- `last`, the oldest first. An episode is selected if all of its turns are: with some of them gone or not selected it is not.
create function dataset_trajectories(policy_name text, query jsonb, only_consenting boolean, from_id uuid, until_id uuid, last uuid)
returns table (episode_id uuid, generation_ids uuid[], tenant_id text, consents boolean)
language sql stable as $$
    with consenting as materialized (
        select consenting_tenants(policy_name) as tenants
    ),
    single as (
        select g.id as last_id, null::uuid as episode_id, array[g.id] as ids, g.tenant_id
        from generation g
        join trajectory t on t.generation_id = g.id
        where g.policy = policy_name
          and t.episode_id is null
          -- Of both tables, so that only the weeks of this time are read.
          and g.id >= from_id and t.generation_id >= from_id
          and g.id < until_id and t.generation_id < until_id
          and g.id <= last and t.generation_id <= last
          and (not only_consenting or g.tenant_id = any ((select tenants from consenting)::text[]))
          and dataset_selects(query, g, t)
        order by g.id
        limit (query ->> 'limit')::bigint
    ),
    -- What this time has of each episode.
    part as (
        select g.tenant_id, t.episode_id, t.episode_turns, array_agg(g.id order by g.segment, g.turn, g.id) as ids,
               (array_agg(g.id order by g.id desc))[1] as last_id
        from generation g
        join trajectory t on t.generation_id = g.id
        where g.policy = policy_name
          and t.episode_id is not null
          and g.id >= from_id and t.generation_id >= from_id
          and g.id < until_id and t.generation_id < until_id
          and g.id <= last and t.generation_id <= last
          and (not only_consenting or g.tenant_id = any ((select tenants from consenting)::text[]))
          and dataset_selects(query, g, t)
        group by g.tenant_id, t.episode_id, t.episode_turns
    ),
    episode as (
        select part.last_id, part.episode_id, coalesce(whole.ids, part.ids) as ids, part.tenant_id
        from part
        -- It may have begun before this time.
        left join lateral (
            select array_agg(g.id order by g.segment, g.turn, g.id) as ids
            from trajectory t
            join generation g on g.id = t.generation_id
            where t.episode_id = part.episode_id and g.tenant_id = part.tenant_id and g.policy = policy_name
              and g.id < until_id and g.id <= last and dataset_selects(query, g, t)
        ) as whole on query ->> 'sampled_from' is not null and cardinality(part.ids) < part.episode_turns
        where cardinality(coalesce(whole.ids, part.ids)) = part.episode_turns
        order by part.last_id
        limit (query ->> 'limit')::bigint
    ),
    oldest as (
        select * from single union all select * from episode
        order by last_id
        limit (query ->> 'limit')::bigint
    )
    select counted.episode_id, counted.ids, counted.tenant_id,
           counted.tenant_id = any ((select tenants from consenting)::text[])
    from (select o.*, sum(cardinality(o.ids)) over (order by o.last_id rows unbounded preceding) as generations
          from oldest o) counted
    -- GENERATIONS_MAX in trainer/src/dataset/query.rs
    where counted.generations <= 1000000
    order by counted.last_id
$$;

-- The trajectories that a dataset's query selects, the oldest first, as far as they are still stored as a whole. A trajectory is
-- as old as its last generation. `generation_ids`: in the order of the session. `consents`: whether their tenant lets the policy be
-- trained on them now.
--
-- `only_consenting` is for a new dataset. Later its query has `tenants`, `closed_before` and `last_id` of that moment, so that
-- nothing is added: not a tenant that consents today, not a trajectory that has closed since, not one that takes the place of an
-- expired one below the limit.
--
-- The role `control` does not see the keys of users, which a query needs, nor the table of consents. This shows only ids and names
-- of tenants, so it runs with the owner's rights. `grant_database_rights` says who may call it.
create function dataset_members(policy_name text, query jsonb, only_consenting boolean)
returns table (episode_id uuid, generation_ids uuid[], tenant_id text, consents boolean)
language sql stable security definer as $$
    select * from dataset_trajectories(
        policy_name, query, only_consenting,
        first_generation_id(coalesce((query ->> 'sampled_from')::timestamptz, 'epoch')),
        first_generation_id(coalesce((query ->> 'sampled_until')::timestamptz, '9999-12-31')),
        coalesce((query ->> 'last_id')::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
$$;
do $$
begin
    execute format('alter function dataset_members(text, jsonb, boolean) set search_path = %I, pg_temp', current_schema());
    revoke execute on function dataset_members(text, jsonb, boolean) from public;
end
$$;

-- Whether feedback about this episode comes too late: some of it has closed, and nothing that is open may use the feedback. A turn
-- that is open after its episode has closed uses none. Of an episode whose generations are trajectories of their own, this looks
-- at the newest 256, because anyone may log any number with one id.
create function episode_feedback_late(tenant text, episode uuid) returns boolean
language sql stable as $$
    select case
        when exists (select from open_episode e where e.episode_id = episode and e.tenant_id = tenant)
             and not episode_closed(tenant, episode) then false
        else (
            select coalesce(bool_or(closed.yes), false) and not coalesce(bool_or(open.yes), false)
            from (select id from generation where episode_id = episode and tenant_id = tenant order by id desc limit 256) g
            -- one by one, or Postgres may read whole tables
            left join lateral (select true as yes from trajectory where generation_id = g.id offset 0) closed on true
            left join lateral (select true as yes from open_generation o
                               where o.generation_id = g.id and o.episode_id is null and not o.stray offset 0) open on true
        )
    end
$$;

-- The number of sampled tokens in a generation's `version_spans`.
create function sampled_tokens(version_spans jsonb) returns bigint
language sql immutable as $$
    select coalesce(sum(case when jsonb_typeof(span -> 1) = 'number' then (span ->> 1)::numeric end), 0)::bigint
    from jsonb_path_query(version_spans, '$[*]') span
$$;

-- Says what each user may do. Called by `springtide migrate` each time, so that users that were made later get their rights.
create or replace function grant_database_rights() returns void
language plpgsql as $$
declare
    user_name text;
    -- What each user may do, beside what all may: (user, rights, tables).
    rights text[][] := array[
        -- ingest: its own tables
        ['ingest', 'select, insert, update, delete',
         'event_key, generation, generation_default, open_generation, open_episode, payload_reference, payload_unreferenced, payload_sweep,
          expired_generation, expiring_generation, generation_expiry, generation_horizon, feedback, retraction, episode_end,
          trajectory, consumer_offset'],
        ['ingest', 'select, insert', 'reward_definition'],
        ['ingest', 'select, insert', 'audit'],
        ['ingest', 'select', 'run, disposition, sampler'],
        -- serve
        ['serve', 'select', 'sampler'],
        -- control: what was logged without its texts and tokens
        ['control', 'select (id, tenant_id, policy, version, root, version_spans, line, arm, replica, purpose, sampled_at)', 'generation'],
        ['control', 'select', 'trajectory, disposition, trajectory_use, expired_generation, ledger, version, line, step, alias, policy, tenant, task'],
        ['control', 'select, insert', 'assignment, release, transition, swap, run_event, experiment, dataset'],
        ['control', 'insert', 'task, policy, tenant'],
        ['control', 'select, insert, update', 'run, replica'],
        ['control', 'select, insert', 'audit'],
        -- train
        ['train', 'select', 'generation, trajectory, payload_reference, open_generation, consumer_offset, reward_definition,
          sampler, assignment, alias, generation_horizon, tenant_consent, task, experiment, dataset'],
        ['train', 'select, insert', 'step, version, baseline, run_event, policy, tenant'],
        ['train', 'select, insert, update', 'run, line'],
        ['train', 'select, insert, delete', 'disposition, published_intent, trajectory_use'],
        ['train', 'select, insert', 'audit'],
        ['train', 'usage, select', 'sequence version_serial']
    ];
    entry text[];
    -- Tables whose rows belong to tenants.
    of_tenants text[] := array['event_key', 'generation', 'feedback', 'retraction', 'episode_end', 'payload_reference',
                               'expired_generation', 'open_episode'];
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
        -- What answers a caller of ingest names the tenant and sees no other. Its jobs name none. Written so that the planner
        -- expects most rows: of a plain comparison with a setting it expects one row in 200, and then it reads a whole week to
        -- find a few generations.
        perform make_policy(t, 'ingest', 'all', 'springtide_ingest',
            $p$(length(current_setting('springtide.tenant', true)) > 0
                and tenant_id <> current_setting('springtide.tenant', true)) is not true$p$);
    end loop;
    -- Every read of control is for a request: of a tenant, or of an administrator.
    foreach t in array array['generation', 'expired_generation'] loop
        perform make_policy(t, 'control_request', 'select', 'springtide_control',
            $p$tenant_id = current_setting('springtide.tenant', true) or current_setting('springtide.all_tenants', true) = 'on'$p$);
    end loop;
    -- A dataset belongs to the tenant whose key made it.
    perform make_policy('dataset', 'control_request', 'all', 'springtide_control',
        $p$tenant_id = current_setting('springtide.tenant', true) or current_setting('springtide.all_tenants', true) = 'on'$p$);
    perform make_policy('dataset', 'train', 'select', 'springtide_train', 'true');
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
        grant execute on function drop_without_consent(text, uuid, uuid, integer), dataset_members(text, jsonb, boolean),
            dataset_tenants(text)
            to springtide_train;
    end if;
    if exists (select from pg_roles where rolname = 'springtide_control') then
        grant execute on function dataset_members(text, jsonb, boolean), dataset_tenants(text), next_dataset_version(text, text)
            to springtide_control;
    end if;
end
$$;

select grant_database_rights();
