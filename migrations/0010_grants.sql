-- A database user for each Springtide role, with the least rights, and the rows that each user
-- sees.
--
-- The owner of the tables migrates, and commands such as `springtide key` use it. `springtide
-- migrate` calls create_database_roles and grant_database_rights each time, so users that are made
-- later get their rights.

-- Makes the users unless they exist. They belong to the whole server, so another database may make
-- them at the same time. Without the right to make users this does nothing, and `springtide
-- migrate` says which are missing.
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

-- Functions that run with the owner's rights: users change no table's form, the trainer sees no
-- tenant that does not consent, and `control` sees no text. grant_database_rights says who may call
-- them.
do $$
declare
    signature text;
begin
    foreach signature in array array[
        'create_generation_partition(text, uuid, uuid)', 'create_trajectory_partition(text, uuid, uuid)',
        'refuse_generations(text, uuid)', 'accept_generations(text)', 'drop_generations(text, uuid)',
        'drop_trajectories(text)', 'drop_without_consent(text, uuid, uuid, integer)',
        'next_dataset_version(text, text)', 'dataset_tenants(text)', 'dataset_members(text, jsonb, boolean)',
        'generation_texts(uuid[])', 'answers_to_the_same_prompt(uuid, integer, integer)',
        'answer_figures(uuid[])', 'demonstrations(uuid[], timestamptz, boolean)',
        'register_erasure(uuid, text, bytea, text)', 'erase_user(text, text, bytea)', 'unlink_arrived(uuid[], uuid[])'
    ] loop
        execute format('alter function %s security definer', signature);
        execute format('alter function %s set search_path = %I, pg_temp', signature, current_schema());
        execute format('revoke execute on function %s from public', signature);
    end loop;
end
$$;

-- Rows that belong to tenants. The owner of the tables sees all; everybody else only what a policy
-- says.
alter table event_key enable row level security;
alter table generation enable row level security;
alter table feedback enable row level security;
alter table retraction enable row level security;
alter table episode_end enable row level security;
alter table payload_reference enable row level security;
alter table expired_generation enable row level security;
alter table open_episode enable row level security;
alter table judgement enable row level security;
alter table dataset enable row level security;

-- Makes a policy unless it exists or its user does not. A policy that exists is kept: a changed
-- rule needs another name.
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

-- Says what each user may do.
create function grant_database_rights() returns void
language plpgsql as $$
declare
    user_name text;
    -- What each user may do, beside what all may: (user, rights, tables).
    rights text[][] := array[
        -- ingest: its own tables
        ['ingest', 'select, insert, update, delete',
         'event_key, consumer_offset, payload_reference, payload_unreferenced, payload_sweep,
          generation, generation_default, open_generation, open_episode, feedback, retraction, episode_end, judgement,
          trajectory, expired_generation, expiring_generation, generation_expiry, generation_horizon'],
        ['ingest', 'select, insert', 'reward_definition, audit'],
        ['ingest', 'select', 'run, rollout, disposition, sampler'],
        -- serve
        ['serve', 'select', 'sampler'],
        -- control: what was logged without its texts and tokens
        ['control', 'select (id, tenant_id, policy, version, root, version_spans, line, arm, arm_probability, replica, purpose,
                             group_id, user_key, surface, finish_reason, declined, decline_suppressed, untrainable, proven,
                             sampled_at, finished_at, stored_at)', 'generation'],
        ['control', 'select', 'trajectory, open_generation, reward_definition, answer, answer_reward, disposition,
                               trajectory_use, ledger, expired_generation, version, line, step, monitor, alias,
                               version_judgment, tenant_consent'],
        ['control', 'select, insert', 'policy, tenant, audit, task, dataset, run_event, assignment, release, transition,
                                       experiment, canary_transition, judgment, swap'],
        ['control', 'select, insert, update', 'run, canary, webhook, replica, engine_use'],
        ['control', 'select, insert, update, delete', 'canary_sums, canary_user, canary_closed, tide_minute'],
        -- a harness leases a rollout, and says what became of it
        ['control', 'select, update', 'rollout'],
        -- and a trainer outside a cohort
        ['control', 'select, update', 'cohort'],
        ['control', 'select', 'cohort_part, erasure'],
        -- train
        ['train', 'select', 'generation, trajectory, payload_reference, open_generation, consumer_offset, reward_definition,
                             sampler, assignment, alias, generation_horizon, tenant_consent, experiment, dataset,
                             erasure'],
        -- garbage collection keeps what a release may go back to
        ['train', 'select', 'canary, version_judgment'],
        -- how old what the fleet samples is
        ['train', 'select (policy, resident, ready, reported_at)', 'replica'],
        ['train', 'select, insert', 'policy, tenant, audit, task, step, version, baseline, run_event, run_judge'],
        ['train', 'select, insert, update', 'run, line, rollout, monitor, cohort'],
        ['train', 'select, insert, delete', 'disposition, published_intent, trajectory_use, cohort_part'],
        ['train', 'select, insert, update, delete', 'judge_answer'],
        ['train', 'usage, select', 'sequence version_serial']
    ];
    entry text[];
    -- Tables whose rows belong to tenants.
    of_tenants text[] := array['event_key', 'generation', 'feedback', 'retraction', 'episode_end', 'payload_reference',
                               'expired_generation', 'open_episode', 'judgement'];
    t text;
begin
    perform pg_advisory_xact_lock(hashtext('grant_database_rights'));
    foreach user_name in array array['springtide_ingest', 'springtide_serve', 'springtide_control', 'springtide_train'] loop
        continue when not exists (select from pg_roles where rolname = user_name);
        execute format('grant usage on schema %I to %I', current_schema(), user_name);
        execute format('revoke all on all tables in schema %I from %I', current_schema(), user_name);
        -- All know the keys of callers, and check whether the schema is theirs.
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

    foreach t in array of_tenants loop
        -- What answers a caller of ingest names the tenant and sees no other. Its jobs name none.
        -- Written so that the planner expects most rows. Of a plain comparison with a setting it
        -- expects one row in 200, and then it reads a whole week to find a few generations.
        perform make_policy(t, 'ingest', 'all', 'springtide_ingest',
            $p$(length(current_setting('springtide.tenant', true)) > 0
                and tenant_id <> current_setting('springtide.tenant', true)) is not true$p$);
    end loop;
    -- Each read of control is for a request: of a tenant, or of an administrator.
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
            refuse_generations(text, uuid), accept_generations(text), drop_generations(text, uuid), drop_trajectories(text),
            unlink_arrived(uuid[], uuid[])
            to springtide_ingest;
    end if;
    if exists (select from pg_roles where rolname = 'springtide_train') then
        grant execute on function drop_without_consent(text, uuid, uuid, integer), dataset_members(text, jsonb, boolean),
            dataset_tenants(text), answer_figures(uuid[]), demonstrations(uuid[], timestamptz, boolean)
            to springtide_train;
    end if;
    if exists (select from pg_roles where rolname = 'springtide_control') then
        grant execute on function dataset_members(text, jsonb, boolean), dataset_tenants(text), next_dataset_version(text, text),
            generation_texts(uuid[]), answer_figures(uuid[]), answers_to_the_same_prompt(uuid, integer, integer),
            register_erasure(uuid, text, bytea, text), erase_user(text, text, bytea)
            to springtide_control;
    end if;
end
$$;

select create_database_roles(), grant_database_rights();
