-- judges: models behind an endpoint that score what users write next (`[[ingest.judge]]`). Written by the crate `ingest` alone.
-- A new table, so nothing is read or rewritten. At the end the rights on every table, as in 20261127000003.

-- One text of a feedback event, and what one judge says about it. The row appears in the transaction that stores the feedback,
-- so a text is never forgotten. It is the queue of the judge, the record of where an answer comes from, and the cache: a tenant's
-- text is asked about once by each version of a judge.
create table judgement (
    feedback_id  uuid not null,                         -- the text
    tenant_id    text not null,
    judge        text not null,                         -- its name in the configuration
    text_digest  bytea not null,                        -- BLAKE3 of the text
    created_at   timestamptz not null default now(),
    attempts     integer not null default 0,            -- that failed
    next_at      timestamptz default now(),             -- when to look at it again. Null: nothing is left to do
    taken_until  timestamptz,                           -- a process is asking about it until then
    version      bytea,                                 -- digest of everything that determines the answer; null: not answered
    value_bool   boolean,                               -- the answer
    value_float  double precision,
    votes        double precision[],                    -- what was answered each time it was asked; a boolean is 0 or 1
    answer_id    uuid,                                  -- id of the feedback event that the answer becomes
    answered_at  timestamptz,
    error        text,                                  -- code: it was given up. Of an answer: null
    reason       text,                                  -- of the latest failure, for people; never user text
    constraint judgement_pkey primary key (feedback_id, tenant_id, judge),
    constraint judgement_answer check (
        num_nonnulls(value_bool, value_float) = (answered_at is not null)::int
        and num_nonnulls(version, votes, answer_id, answered_at) in (0, 4)
        and (error is null or answered_at is null)
    )
);
-- The queue, by tenant, because tenants get equal shares.
create index judgement_by_next_at on judgement (judge, tenant_id, next_at) where next_at is not null;
-- The cache, and which texts are being asked about.
create index judgement_by_text on judgement (tenant_id, judge, text_digest);
-- A retraction of the text takes the answer back.
create index judgement_by_answer on judgement (answer_id) where answer_id is not null;
alter table judgement enable row level security;

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
