-- judges of offline runs: what models behind endpoints answered about rollouts (`[[trainer.judge]]`). Written by the crate
-- `trainer` alone. New tables, so nothing is read or rewritten. At the end the rights on every table, as in 20261201000001.

-- One vote of a judge, so that the same question is not paid for twice, and a run can be graded again without the endpoint.
-- There is no text in it: neither of the task, nor of the rollout, nor of the judge, whose whole answer is one number. Who has a
-- text can tell from its digest that it was judged, so a row goes with the newest rollout that it graded.
create table judge_answer (
    policy         text not null,                       -- answers about one policy's rollouts are never used for another's
    digest         bytea not null,                      -- BLAKE3 of the judge's name, the model asked for, the form of the answer,
                                                        -- the sampling parameters, the number of the vote and all messages
    model          text not null,                       -- that answered, as the endpoint calls it
    fingerprint    text,                                -- the endpoint's system_fingerprint; null: it has none
    score          double precision not null,           -- the answer; of a yes or no: 1 or 0
    rollout_id     uuid not null,                       -- the newest rollout that it graded; its id has the time of its generations
    answered_at    timestamptz not null default now(),
    constraint judge_answer_pkey primary key (policy, digest, model),
    constraint judge_answer_score check (score not in ('NaN', 'Infinity', '-Infinity'))
);
-- Retention deletes by the time of rollouts, as it does generations.
create index judge_answer_by_rollout on judge_answer (rollout_id);

-- Which model a judge was when a run began. It must stay the same until the run ends.
create table run_judge (
    run_id       uuid not null references run (id),
    judge        text not null,                         -- its name in the configuration
    model        text not null,                         -- of the first answer, as the endpoint calls it
    fingerprint  text,
    first_at     timestamptz not null default now(),
    constraint run_judge_pkey primary key (run_id, judge)
);

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
          trajectory, consumer_offset, judgement'],
        ['ingest', 'select, insert', 'reward_definition'],
        ['ingest', 'select, insert', 'audit'],
        ['ingest', 'select', 'run, rollout, disposition, sampler'],
        -- serve
        ['serve', 'select', 'sampler'],
        -- control: what was logged without its texts and tokens
        ['control', 'select (id, tenant_id, policy, version, root, version_spans, line, arm, replica, purpose, sampled_at)', 'generation'],
        ['control', 'select', 'trajectory, disposition, trajectory_use, expired_generation, ledger, version, line, step, alias, policy, tenant, task'],
        -- a harness takes a rollout, and says what became of it
        ['control', 'select, update', 'rollout'],
        ['control', 'select, insert', 'assignment, release, transition, swap, run_event, experiment, dataset'],
        ['control', 'insert', 'task, policy, tenant'],
        ['control', 'select, insert, update', 'run, replica'],
        ['control', 'select, insert', 'audit'],
        -- train
        ['train', 'select', 'generation, trajectory, payload_reference, open_generation, consumer_offset, reward_definition,
          sampler, assignment, alias, generation_horizon, tenant_consent, task, experiment, dataset'],
        ['train', 'select, insert', 'step, version, baseline, run_event, run_judge, policy, tenant'],
        ['train', 'select, insert, update', 'run, line, rollout'],
        ['train', 'select, insert, delete', 'disposition, published_intent, trajectory_use'],
        -- how old what the fleet samples is
        ['train', 'select (policy, resident, ready, reported_at)', 'replica'],
        ['train', 'select, insert, update, delete', 'judge_answer'],
        ['train', 'select, insert', 'audit'],
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
