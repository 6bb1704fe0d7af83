-- Which version each user gets: assignments, experiments, canaries and what they found out. Written
-- by the crate `release`, in the role `control`.

-- alias → version. One row per change; the row with the highest epoch of an alias is in force.
-- Followers get the same facts as one signed document per epoch.
create table assignment (
    policy      text not null,
    epoch       bigint not null,  -- rises with each change of any alias of the policy
    alias       text not null,
    version     bigint not null,
    -- The line whose head the alias follows while guards pass. Null: pinned by hand.
    follows     text,
    -- Only heads of this branch of that line or a later one are followed.
    branch      integer not null default 0,
    withdrawn   boolean not null default false,  -- the alias no longer exists (a finished run's)
    created_at  timestamptz not null default now(),
    -- Of the alias `canary`: the share of champion's users that it takes from this epoch on. Null:
    -- none.
    share       double precision,
    -- Of the alias `canary`: the clusters whose replicas give users its version. Null: all.
    clusters    text[],
    -- Of the alias `canary`: the share of champion's requests that replicas answer a second time
    -- with it, before the first user, seen by nobody. Null: none.
    shadow      double precision,
    constraint assignment_pkey primary key (policy, epoch, alias),
    constraint assignment_share check (share is null or (alias = 'canary' and share > 0 and share <= 1)),
    constraint assignment_clusters check (clusters is null or (share is not null and cardinality(clusters) > 0)),
    constraint assignment_shadow
        check (shadow is null or (alias = 'canary' and share is null and shadow > 0 and shadow <= 1))
);
-- Was this version ever assigned to this arm?
create index assignment_by_version on assignment (policy, alias, version, epoch);

-- alias → version now.
create view alias as
    select distinct on (policy, alias) policy, alias, version, follows, branch, epoch, withdrawn, created_at
    from assignment
    order by policy, alias, epoch desc;

-- Why a generation may not be trained on, as far as tables tell; null: nothing speaks against it.
-- The caller verifies the signature itself. A sampler may be registered after it has sampled.
-- Clocks may differ by five seconds. A replica may answer by the previous assignment for five
-- minutes, because requests that began on it end on it.
create function provenance_fault(
    sampler_id text, replica text, policy_name text, arm text, version_serial bigint,
    sampled_at timestamptz, stored_at timestamptz
) returns text
language sql stable as $$
    select case
        when sampler_id is null then 'unproven'
        when s.id is null then 'unknown_sampler'
        when s.revoked_at is not null then 'revoked_sampler'
        when s.expires_at <= stored_at then 'expired_sampler'
        when s.name <> replica then 'sampler_of_another_replica'
        when s.policy <> policy_name then 'sampler_of_another_policy'
        when sampled_at > stored_at + interval '5 seconds' then 'sampled_in_the_future'
        when not exists (
            select from assignment a
            where a.policy = policy_name and a.alias = arm and a.version = version_serial and not a.withdrawn
              and a.created_at <= sampled_at + interval '5 seconds'
              and not exists (
                  select from assignment later
                  where later.policy = policy_name and later.alias = arm and later.epoch > a.epoch
                    and (later.version <> version_serial or later.withdrawn)
                    and later.created_at < sampled_at - interval '5 minutes')
        ) then 'version_not_assigned'
    end
    from (select 1) as one
    left join sampler s on s.id = sampler_id
$$;

-- An alias moving from one version to another: why, by whom, how it ended.
create table release (
    id            uuid primary key default uuidv7(),
    policy        text not null,
    alias         text not null,
    from_version  bigint,
    to_version    bigint not null,
    kind          text not null,
    status        text not null,
    created_at    timestamptz not null default now(),
    constraint release_kind check (kind in ('follow', 'promote', 'rollback', 'pin', 'canary')),
    constraint release_status check (status in ('done', 'refused'))
);
-- The few moves that people asked for, for the webhooks.
create index release_by_request on release (policy, id) where kind in ('promote', 'rollback', 'pin');

-- One row per decision about a release.
create table transition (
    id          uuid primary key default uuidv7(),
    release_id  uuid not null references release (id),
    epoch       bigint,         -- the assignment it led to; null: refused
    actor       text not null,  -- 'follow', or the API key's label, or 'operator'
    reason      text not null,
    at          timestamptz not null default now()
);

-- The arms that users are divided into, since which assignment, by whom and why. No row changes or
-- goes. The row with the highest epoch of a policy is in force.
create table experiment (
    id          uuid not null default uuidv7(),
    policy      text not null,
    epoch       bigint not null,  -- the first assignment that divides users by it
    salt        text not null,    -- another one draws each user's arm anew; '': none
    -- [{"alias": "learner", "weight": 0.3, "explore": 0.02}, …], in order.
    arms        jsonb not null,
    source      text not null,    -- a changed configuration replaces 'configuration', not 'request'
    actor       text not null,    -- the API key's label, or the role that read the configuration
    reason      text not null,
    created_at  timestamptz not null default clock_timestamp(),
    constraint experiment_pkey primary key (id),
    constraint experiment_epoch unique (policy, epoch),
    constraint experiment_source check (source in ('configuration', 'request'))
);

-- A version on its way to `champion`, tried on some of champion's users first. What happened to it
-- is in `canary_transition`.
create table canary (
    id           uuid not null default uuidv7(),
    policy       text not null,
    version      bigint not null,
    -- The version of champion it is compared with; null: it has no users yet.
    control      bigint,
    strategy     jsonb not null,  -- steps and what is compared, as in the request
    state        text not null default 'proposed',  -- canary::machine::State
    step         integer not null default 0,  -- of strategy.steps
    step_since   timestamptz not null default clock_timestamp(),
    actor        text not null,   -- the API key's label
    reason       text not null,
    created_at   timestamptz not null default clock_timestamp(),
    -- Of strategy.evaluation: the runs that the gate waits for, of the version and of champion.
    evaluations  uuid[] not null default '{}',
    constraint canary_pkey primary key (id),
    constraint canary_state check (state in ('proposed', 'gated', 'shadow', 'canary', 'paused', 'held', 'watched', 'champion', 'retired', 'aborted', 'rolled_back'))
);
-- Others wait as 'proposed'.
create unique index canary_under_way on canary (policy) where state in ('gated', 'shadow', 'canary', 'paused', 'held', 'watched');
create index canary_by_policy on canary (policy, id);

-- Each decision about a canary: by whom, why, and on what evidence. Append-only.
create table canary_transition (
    id          uuid not null default uuidv7(),
    canary_id   uuid not null references canary (id),
    event       text not null,              -- canary::machine::Event
    from_state  text not null,
    to_state    text not null,              -- an approval leaves it 'proposed'
    step        integer not null,           -- after it
    epoch       bigint,                     -- the assignment that it led to; null: none
    share       double precision not null,  -- of champion's users, after it
    actor       text not null,              -- the API key's label, or 'release': the release loop
    reason      text not null,
    evidence    jsonb,                      -- what the release loop decided on
    at          timestamptz not null default clock_timestamp(),
    constraint canary_transition_pkey primary key (id)
);
create index canary_transition_by_canary on canary_transition (canary_id, id);

-- Whose users count: the policy's tenant, and tenants that consent.
create function canary_tenants(policy_name text) returns setof text
language sql stable as $$
    select coalesce((select p.tenant_id from policy p where p.name = policy_name), 'default')
    union all
    select c.tenant_id from tenant_consent c where c.policy = policy_name and c.withdrawn_at is null
$$;

-- The answers of a canary and of the version that it is compared with. `shares`: of the periods, of
-- champion's users, who are `weight` of all. `slow_seconds`: after which an answer is slow, or
-- null.
--
-- An answer belongs to the period whose probabilities it was drawn with, not to the time: replicas
-- take a new assignment seconds after it was written. So requests that name an alias, whose
-- probability is 1, belong to none.
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

-- Answers of a canary that wait for their rewards; of a session its last turn so far.
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

-- How far the answers of a canary are summed up. With the sums the release loop reads a row per
-- user, however many answers there are.
create table canary_sums (
    canary_id  uuid not null references canary (id),
    since      timestamptz not null,  -- answers sampled before do not count
    until_at   timestamptz not null,  -- what was stored before is in canary_user and canary_closed
    constraint canary_sums_pkey primary key (canary_id)
);

-- What one user did in one period on one side: sums of answers, and of trajectories.
create table canary_user (
    canary_id      uuid not null references canary (id),
    is_canary      boolean not null,
    period         bigint not null,  -- of one share: 1, 2, …
    person         text not null,    -- as in `answer`
    tenant_id      text not null,
    first          uuid not null,    -- the first answer
    first_aborted  boolean not null,
    answers        bigint not null,
    declined       bigint not null,
    aborted        bigint not null,
    slow           bigint not null,
    whole          bigint not null,  -- neither declined nor aborted
    tokens         bigint not null,  -- of these
    rewarded       bigint not null default 0,
    unscored       bigint not null default 0,
    excluded       bigint not null default 0,
    reward         double precision not null default 0,
    lowest         double precision not null default 0,  -- what the unscored might have had
    highest        double precision not null default 0,
    constraint canary_user_pkey primary key (canary_id, is_canary, period, person)
);

-- Trajectories that have closed and do not count yet, because something older of their surface
-- waits for its reward. An episode is one, by its last turn.
create table canary_closed (
    canary_id      uuid not null references canary (id),
    generation_id  uuid not null,
    surface        text not null,
    is_canary      boolean not null,
    period         bigint not null,
    person         text not null,
    tenant_id      text not null,
    reward         double precision,  -- null: it has none that counts
    excluded       boolean not null,
    lowest         double precision,
    highest        double precision,
    constraint canary_closed_pkey primary key (canary_id, surface, generation_id)
);

-- Which versions are good and which are bad, as canaries and people found out. Append-only: the
-- newest judgment of a version counts. A version without one counts as its nearest judged ancestor
-- does, because it was trained on top of it.
create table judgment (
    id         uuid not null default uuidv7(),
    policy     text not null,
    version    bigint not null,
    verdict    text not null,   -- judgment::Verdict
    canary_id  uuid references canary (id),  -- whose evidence it is; null: a person's word
    actor      text not null,   -- the API key's label, or 'release': the release loop
    reason     text not null,
    at         timestamptz not null default clock_timestamp(),
    constraint judgment_pkey primary key (id),
    constraint judgment_verdict check (verdict in ('good', 'bad'))
);
create index judgment_by_version on judgment (policy, version, id);

-- The judgments that count.
create view version_judgment as
    select distinct on (policy, version) id, policy, version, verdict, canary_id, actor, reason, at
    from judgment
    order by policy, version, id desc;

-- How far each receiver of decisions has got. Decisions are in `canary_transition` and
-- `transition`.
create table webhook (
    policy      text not null,
    name        text not null,  -- [[release.webhook]] name
    -- Id of the last decision that it has acknowledged, or that was given up.
    sent_until  uuid not null,
    failures    integer not null default 0,  -- attempts in a row that failed
    next_at     timestamptz not null default clock_timestamp(),
    last_error  text,           -- of the last attempt; null: it succeeded
    updated_at  timestamptz not null default clock_timestamp(),
    constraint webhook_pkey primary key (policy, name)
);
