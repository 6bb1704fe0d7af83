-- canaries: a version on its way to `champion`, tried on some of champion's users first. New tables, and a column that is null in
-- all rows so far, so nothing is rewritten.

-- Written by the crate `serving` alone. One row per canary; what happened to it is in `canary_transition`.
create table canary (
    id          uuid not null default uuidv7(),
    policy      text not null,
    version     bigint not null,
    control     bigint,                                 -- the version of champion that it is compared with; null: it has no users yet
    strategy    jsonb not null,                         -- steps and what is compared, as in the request
    state       text not null default 'proposed',       -- release::canary::machine::State
    step        integer not null default 0,             -- of strategy.steps
    step_since  timestamptz not null default clock_timestamp(),
    actor       text not null,                          -- the API key's label
    reason      text not null,
    created_at  timestamptz not null default clock_timestamp(),
    constraint canary_pkey primary key (id),
    constraint canary_state check (state in ('proposed', 'gated', 'canary', 'paused', 'held', 'watched', 'champion', 'retired', 'aborted', 'rolled_back'))
);
-- Others wait as 'proposed'.
create unique index canary_under_way on canary (policy) where state in ('gated', 'canary', 'paused', 'held', 'watched');
create index canary_by_policy on canary (policy, id);

-- Append-only: each decision about a canary, by whom, why, and on what evidence.
create table canary_transition (
    id          uuid not null default uuidv7(),
    canary_id   uuid not null references canary (id),
    event       text not null,                          -- release::canary::machine::Event
    from_state  text not null,
    to_state    text not null,                          -- an approval leaves it 'proposed'
    step        integer not null,                       -- after it
    epoch       bigint,                                 -- the assignment that it led to; null: none
    share       double precision not null,              -- of champion's users, after it
    actor       text not null,                          -- the API key's label, or 'release': the release loop
    reason      text not null,
    evidence    jsonb,                                  -- what the release loop decided on
    at          timestamptz not null default clock_timestamp(),
    constraint canary_transition_pkey primary key (id)
);
create index canary_transition_by_canary on canary_transition (canary_id, id);

-- Of the alias `canary`: the share of champion's users that it takes from this epoch on. Null: the alias takes none.
alter table assignment add column share double precision;
alter table assignment add constraint assignment_share check (share is null or (alias = 'canary' and share > 0 and share <= 1));

-- The canary's moves of aliases.
alter table release drop constraint release_kind;
alter table release add constraint release_kind check (kind in ('follow', 'promote', 'rollback', 'pin', 'canary'));

-- The answers that say something about a version: a replica sampled them for users, nobody made them up, and none was forced. Canaries,
-- comparisons and pages count these and no others, with the rights of who asks.
create view answer with (security_invoker = true) as
    select id, tenant_id, policy, version, arm, arm_probability, surface, user_key, sampled_at, finished_at, stored_at, finish_reason,
           declined, untrainable, version_spans,
           -- Whom it counts for. A request without a user has a key of its own, so all of a tenant's count as one user.
           tenant_id || '/' || case when starts_with(user_key, 'anonymous-') then 'anonymous' else user_key end as person
    from generation
    where purpose = 'production' and proven and not decline_suppressed
      -- the caller moved its end, or chose it among several
      and coalesce(untrainable not in ('steered_end', 'chosen'), true);

-- What became of answers. A reward out of the bounds that training has is none, and `excluded`: one such must not decide anything.
create view answer_reward with (security_invoker = true) as
    select t.generation_id, t.episode_id, t.signal, t.censor_code, t.closed_at,
           case when reward_in_bounds(t.reward, d.definition) then t.reward end as reward,
           t.reward is not null and not reward_in_bounds(t.reward, d.definition) as excluded,
           -- the lowest and the highest that it may be, or might have been
           reward_lowest(d.definition) as lowest,
           reward_highest(d.definition) as highest
    from trajectory t
    left join reward_definition d on d.surface = t.surface and d.version = t.reward_definition;

-- Whose users count: the policy's tenant, and those that consent.
create function canary_tenants(policy_name text) returns setof text
language sql stable as $$
    select coalesce((select p.tenant_id from policy p where p.name = policy_name), 'default')
    union all
    select c.tenant_id from tenant_consent c where c.policy = policy_name and c.withdrawn_at is null
$$;

-- The answers of a canary and of the version that it is compared with. `shares`: of the periods, of champion's users, who are `weight`
-- of all. `slow_seconds`: after which an answer is slow, or null.
--
-- An answer belongs to the period whose probabilities it was drawn with, not to the time: replicas take a new assignment
-- seconds after it was written. So requests that name an alias, whose probability is 1, belong to none.
create function canary_answers(policy_name text, canary_version bigint, champion_version bigint, shares double precision[],
                               weight double precision, sampled_from timestamptz, sampled_until timestamptz,
                               slow_seconds double precision)
returns table (id uuid, is_canary boolean, period bigint, tenant_id text, person text, surface text, aborted boolean,
               declined boolean, slow boolean, tokens bigint, stored_at timestamptz)
language sql stable as $$
    select g.id, g.arm = 'canary', period.number, g.tenant_id, g.person, g.surface, g.finish_reason = 'abort', g.declined,
           g.finished_at - g.sampled_at > make_interval(secs => slow_seconds), sampled_tokens(g.version_spans), g.stored_at
    from answer g
    join unnest(shares) with ordinality as period (share, number)
         on abs(g.arm_probability - weight * case when g.arm = 'canary' then period.share else 1 - period.share end) < 1e-5
    where g.policy = policy_name
      and (g.arm = 'canary' and g.version = canary_version or g.arm = 'champion' and g.version = champion_version)
      and g.arm_probability < 1
      and g.tenant_id in (select canary_tenants(policy_name))
      and g.id >= first_generation_id(sampled_from)
      and g.sampled_at >= sampled_from
      and g.sampled_at < sampled_until
$$;

-- Those that wait for their rewards, of a session its last turn so far.
create function canary_waiting(policy_name text, canary_version bigint, champion_version bigint, shares double precision[],
                               weight double precision, sampled_from timestamptz, sampled_until timestamptz,
                               slow_seconds double precision)
returns table (surface text, id uuid)
language sql stable as $$
    select distinct on (coalesce(o.episode_id, o.generation_id)) o.surface, o.generation_id
    from open_generation o
    join canary_answers(policy_name, canary_version, champion_version, shares, weight, sampled_from, sampled_until, slow_seconds) d
         on d.id = o.generation_id
    where o.proven
    order by coalesce(o.episode_id, o.generation_id), o.generation_id desc
$$;

-- How far the answers of a canary are summed up. So the release loop reads a row per user, however many answers there are.
create table canary_sums (
    canary_id   uuid not null references canary (id),
    since       timestamptz not null,                   -- answers sampled before do not count
    until_at    timestamptz not null,                   -- what was stored before is in canary_user and canary_closed
    constraint canary_sums_pkey primary key (canary_id)
);

-- What one user did in one period on one side: sums of answers, and of trajectories.
create table canary_user (
    canary_id   uuid not null references canary (id),
    is_canary   boolean not null,
    period      bigint not null,                        -- of one share: 1, 2, …
    person      text not null,                          -- as in `answer`
    tenant_id   text not null,
    first       uuid not null,                          -- the first answer
    first_aborted boolean not null,
    answers     bigint not null,
    declined    bigint not null,
    aborted     bigint not null,
    slow        bigint not null,
    whole       bigint not null,                        -- neither declined nor aborted
    tokens      bigint not null,                        -- of these
    rewarded    bigint not null default 0,
    unscored    bigint not null default 0,
    excluded    bigint not null default 0,
    reward      double precision not null default 0,
    lowest      double precision not null default 0,    -- what the unscored might have had
    highest     double precision not null default 0,
    constraint canary_user_pkey primary key (canary_id, is_canary, period, person)
);

-- Trajectories that have closed and do not count yet, because something older of their surface waits for its reward. An episode is
-- one, by its last turn.
create table canary_closed (
    canary_id     uuid not null references canary (id),
    generation_id uuid not null,
    surface       text not null,
    is_canary     boolean not null,
    period        bigint not null,
    person        text not null,
    tenant_id     text not null,
    reward        double precision,                     -- null: it has none that counts
    excluded      boolean not null,
    lowest        double precision,
    highest       double precision,
    constraint canary_closed_pkey primary key (canary_id, surface, generation_id)
);

-- What was stored and what closed lately. Rows of one transaction have the same time, so the indexes are small.
create index generation_by_stored_at on generation (stored_at);
create index trajectory_by_closed_at on trajectory (closed_at);

-- The release loop compares what users did with a canary's answers and with champion's. It reads no text and no token. Adds to
-- what `grant_database_rights` grants, whatever else that is by now.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(
        replace(before, 'line, arm, replica, purpose, sampled_at)''',
            'line, arm, replica, purpose, sampled_at, user_key, finish_reason, declined, decline_suppressed,
              arm_probability, proven, stored_at)'''),
        '[''control'', ''insert'', ''task, policy, tenant''],',
        '[''control'', ''insert'', ''task, policy, tenant''],
        [''control'', ''select, insert, update'', ''canary''],
        [''control'', ''select, insert'', ''canary_transition''],
        [''control'', ''select, insert, update, delete'', ''canary_sums, canary_user, canary_closed''],
        [''control'', ''select'', ''tenant_consent''],
        [''control'', ''select'', ''answer, answer_reward, reward_definition, open_generation''],');
begin
    if after = before or position('user_key, finish_reason' in after) = 0 or position('canary_transition' in after) = 0 then
        raise exception 'grant_database_rights does not name what control may read and insert';
    end if;
    execute after;
end
$$;

select grant_database_rights();
