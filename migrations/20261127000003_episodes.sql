-- an episode is one trajectory. Columns of `trajectory` and `open_generation`, and the table `open_episode`, all written by the
-- crate `ingest` alone. At the end the rights on every table that is new since 20261126000007.
--
-- On an existing database nothing is rewritten: the columns are null, which means what it meant before. Two steps read a table
-- once: the check constraint reads `trajectory`, the index reads `open_generation`, which is small.

-- An episode whose turns wait for their reward. Its row appears with its first open turn and goes with their trajectories, in
-- one transaction each. Sinks and closer lock this row, never the rows of its turns (ingest/src/rows/join.rs).
create table open_episode (
    episode_id      uuid not null,
    tenant_id       text not null,
    surface         text not null,                      -- of the turn that was stored first
    opened_at       timestamptz not null default now(), -- when that turn was stored
    turn_stored_at  timestamptz not null,               -- when the last turn was stored
    closes_at       timestamptz not null,               -- when to look whether it is over
    constraint open_episode_pkey primary key (episode_id, tenant_id)
);
create index open_episode_by_closes_at on open_episode (closes_at);
alter table open_episode enable row level security;

-- Set: the generation is a turn, and closes with this episode. `closes_at` is then the end of its own horizon, which closes
-- nothing. Null: it is a trajectory of its own.
alter table open_generation add column episode_id uuid;
create index open_generation_by_episode on open_generation (episode_id, generation_id) where episode_id is not null;
-- The closer walks along this one. It must not meet the turns, which may wait for days.
drop index open_generation_by_closes_at;
create index open_generation_by_closes_at on open_generation (closes_at) where episode_id is null;

alter table trajectory
    -- Null: the generation is the trajectory. Set: the trajectory is this episode of the generation's tenant. All of its turns
    -- have rows with the same reward, censor code, signal, closes_at and closed_at, written by one transaction. A turn that came
    -- after its episode had closed has null and the code 'late_turn'.
    add column episode_id uuid,
    -- How many turns the episode had when it closed. With fewer rows, retention has deleted some of it.
    add column episode_turns integer,
    -- The turn's own reward. Null: it has none.
    add column turn_reward double precision,
    add constraint trajectory_episode check ((episode_id is null) = (episode_turns is null)),
    add constraint trajectory_turn_reward check (turn_reward is null or (reward is not null and episode_id is not null));

-- Whether turns of this episode have closed together. Feedback that comes later is late, and so are turns.
create function episode_closed(tenant text, episode uuid) returns boolean
language sql stable as $$
    select exists (
        select from trajectory t
        join generation g on g.id = t.generation_id
        where t.episode_id = episode and g.tenant_id = tenant
    )
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
        ['control', 'select', 'trajectory, disposition, expired_generation, ledger, version, line, step, alias, policy, tenant, task'],
        ['control', 'select, insert', 'assignment, release, transition, swap, run_event, experiment, trajectory_use, dataset'],
        ['control', 'insert', 'task, policy, tenant'],
        ['control', 'select, insert, update', 'run, replica'],
        ['control', 'select, insert', 'audit'],
        -- train
        ['train', 'select', 'generation, trajectory, payload_reference, open_generation, consumer_offset, reward_definition,
          sampler, assignment, alias, generation_horizon, tenant_consent, task, experiment'],
        ['train', 'select, insert', 'step, version, baseline, run_event, policy, tenant, dataset'],
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
        -- What answers a caller of ingest names the tenant and sees no other. Its jobs name none.
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
        grant execute on function drop_without_consent(text, uuid, uuid, integer), dataset_members(text, jsonb, boolean),
            dataset_tenants(text)
            to springtide_train;
    end if;
    if exists (select from pg_roles where rolname = 'springtide_control') then
        grant execute on function dataset_members(text, jsonb, boolean), dataset_tenants(text) to springtide_control;
    end if;
end
$$;

select grant_database_rights();
