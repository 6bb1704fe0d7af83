-- What offline runs train on: tasks with rollouts and their judges, and datasets. Written by the
-- crate `trainer`.

-- The tasks of an offline run, as given.
create table task (
    run_id  uuid not null references run (id),
    id      text not null,
    prompt  text not null,
    answer  text not null,      -- what the grader compares with
    constraint task_pkey primary key (run_id, id)
);

-- Rollouts of GRPO runs. A harness, the trainer's own or one outside, leases a rollout for a time,
-- lets the policy act, and posts the reward. The trainer's API makes the changes a harness asks
-- for.
create table rollout (
    id             uuid not null,    -- also the episode of its generations
    run_id         uuid not null references run (id),
    task_id        text not null,
    group_id       uuid not null,    -- the rollouts of one draw of a task
    draw           bigint not null,  -- which draw of the run, from 0; the order of training
    -- How many rollouts of the group were lost before it.
    attempt        integer not null default 0,
    -- offered:  waits for a harness
    -- leased:   a harness works on it, until expires_at
    -- rewarded: the harness has posted the reward
    -- failed:   it has no reward: the harness gave up, or was silent until expires_at (see `code`)
    -- settled:  the end of its episode is in the log, with the reward if it has one
    -- spent:    a step was made of its group, or the group has nothing to learn from
    state          text not null default 'offered',
    code           text,             -- why it has no reward, such as lease_expired
    reason         text,             -- what the harness said when it gave up
    holder         text,             -- label of the key that leased it
    -- SHA-256 of the secret of its lease. The agent that samples does not know the secret, so it
    -- cannot reward itself.
    secret_digest  bytea,
    -- The generations that the trainer's own harness received. Null: none, or another harness made
    -- it.
    answers        uuid[],
    reward         double precision,
    offered_at     timestamptz not null default now(),
    leased_at      timestamptz,
    expires_at     timestamptz,
    finished_at    timestamptz,      -- when it was rewarded or failed
    settled_at     timestamptz,
    -- What a `multi` grader computed the reward from: its graders' rewards by name. Null: it had
    -- none.
    reward_parts   jsonb,
    constraint rollout_pkey primary key (id),
    constraint rollout_task foreign key (run_id, task_id) references task (run_id, id),
    constraint rollout_state check (state in ('offered', 'leased', 'rewarded', 'failed', 'settled', 'spent')),
    constraint rollout_lease check (state <> 'leased' or (holder is not null and expires_at is not null)),
    constraint rollout_reward check (state <> 'rewarded' or reward is not null)
);
-- A run still works on few rollouts and has spent many.
create index rollout_unspent on rollout (run_id, draw, id) where state <> 'spent';
create index rollout_by_run on rollout (run_id, state);

-- Whether nothing more can come for a rollout that has ended: every answer that the trainer's own
-- harness received waits for its reward. False if another harness made it.
create function rollout_is_complete(episode uuid) returns boolean
language sql stable as $$
    select exists (
        select from rollout
        where id = episode and state in ('rewarded', 'settled')
          and answers <@ array(select generation_id from open_generation where episode_id = episode))
$$;

-- One vote of a judge: a model behind an endpoint that grades rollouts (`[[trainer.judge]]`). The
-- same question is not paid for twice, and a run can be graded again without the endpoint. It
-- contains no text of the task, the rollout or the judge, whose whole answer is one number. But
-- whoever has a text can tell from its digest that it was judged, so a row goes with the newest
-- rollout that it graded.
create table judge_answer (
    policy       text not null,  -- answers about one policy's rollouts are never used for another's
    -- BLAKE3 of the judge's name, the model asked for, the form of the answer, the sampling
    -- parameters, the number of the vote and all messages.
    digest       bytea not null,
    model        text not null,  -- that answered, as the endpoint calls it
    fingerprint  text,           -- the endpoint's system_fingerprint; null: it has none
    score        double precision not null,  -- the answer; yes or no is 1 or 0
    -- The newest rollout that it graded; its id has that rollout's time.
    rollout_id   uuid not null,
    answered_at  timestamptz not null default now(),
    constraint judge_answer_pkey primary key (policy, digest, model),
    constraint judge_answer_score check (score not in ('NaN', 'Infinity', '-Infinity'))
);
-- Retention deletes by the time of rollouts, as it does generations.
create index judge_answer_by_rollout on judge_answer (rollout_id);

-- Which model a judge was when a run began. It must stay the same until the run ends.
create table run_judge (
    run_id       uuid not null references run (id),
    judge        text not null,  -- its name in the configuration
    model        text not null,  -- of the first answer, as the endpoint calls it
    fingerprint  text,
    first_at     timestamptz not null default now(),
    constraint run_judge_pkey primary key (run_id, judge)
);

-- A named query over closed trajectories. A version of it never changes.
create table dataset (
    policy        text not null,
    name          text not null,
    version       integer not null,  -- 1, 2, … of this name
    tenant_id     text not null,     -- of the key that made it
    query         jsonb not null,    -- what dataset_members reads
    created_by    text not null,     -- label of that key
    created_at    timestamptz not null default clock_timestamp(),
    trajectories  bigint not null,   -- how many it selected then
    generations   bigint not null,   -- how many they have together
    digest        bytea not null,    -- BLAKE3 of their ids in ascending order, 16 bytes each
    constraint dataset_pkey primary key (policy, name, version),
    constraint dataset_version check (version >= 1)
);

-- The next version of a name. `control` sees only versions of the caller's tenant, so this runs
-- with the owner's rights.
create function next_dataset_version(policy_name text, dataset_name text) returns integer
language sql stable as $$
    select coalesce(max(version), 0) + 1 from dataset where policy = policy_name and name = dataset_name
$$;

-- Whose rows an exported file may show now. `control` does not see the table of consents, so this
-- runs with the owner's rights.
create function dataset_tenants(policy_name text) returns text[]
language sql stable as $$ select consenting_tenants(policy_name) $$;

-- Whether a user is in the share of a split. A user is a pair of tenant and key. The same salt
-- gives the same users. Null: there is no split, so everybody is. The user's place in [0, 1) is the
-- first four bytes of a SHA-256, as a big-endian number, over 2³².
create function user_in_split(split jsonb, tenant text, user_key text) returns boolean
language sql stable parallel safe as $$
    select split is null
        or coalesce((split ->> 'rest')::boolean, false) <> (
            ('x' || left(encode(sha256(convert_to(
                concat(length(split ->> 'salt'), ':', split ->> 'salt', length(tenant), ':', tenant, user_key), 'UTF8')), 'hex'), 8)
            )::bit(32)::bigint < (split ->> 'share')::double precision * 4294967296)
$$;

-- Whether a dataset's query selects a generation, apart from its time. No dataset contains what was
-- logged as not to be trained on, nor what a tenant logged while it did not consent: a later
-- consent does not bring it back.
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
        and not exists (select from erasure e
                        where e.tenant_id = g.tenant_id and e.user_digest = user_digest(g.tenant_id, g.user_key))
$$;

-- The trajectories that a query selects among those whose last generation is from `from_id` on,
-- before `until_id` and not after `last`, the oldest first. An episode is selected if all of its
-- turns are stored and selected.
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
    -- GENERATIONS_MAX in trainer/runs/src/dataset/query.rs
    where counted.generations <= 1000000
    order by counted.last_id
$$;

-- The trajectories that a dataset's query selects, the oldest first, as far as they are still
-- stored as a whole. A trajectory is as old as its last generation. `generation_ids`: in the order
-- of the session. `consents`: whether their tenant lets the policy be trained on them now.
--
-- `only_consenting` is for a new dataset. Later its query has `tenants`, `closed_before` and
-- `last_id` of that moment, so that nothing is added: not a tenant that consents today, not a
-- trajectory that has closed since, not one that takes the place of an expired one below the limit.
--
-- `control` does not see the keys of users, which a query needs, nor the table of consents. This
-- shows only ids and names of tenants, so it runs with the owner's rights.
create function dataset_members(policy_name text, query jsonb, only_consenting boolean)
returns table (episode_id uuid, generation_ids uuid[], tenant_id text, consents boolean)
language sql stable as $$
    select * from dataset_trajectories(
        policy_name, query, only_consenting,
        first_generation_id(coalesce((query ->> 'sampled_from')::timestamptz, 'epoch')),
        first_generation_id(coalesce((query ->> 'sampled_until')::timestamptz, '9999-12-31')),
        coalesce((query ->> 'last_id')::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
$$;
