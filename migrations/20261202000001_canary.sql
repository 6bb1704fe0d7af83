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
    select id, tenant_id, policy, version, arm, arm_probability, surface, user_key, sampled_at, finished_at, finish_reason, declined,
           untrainable, version_spans,
           -- Whom it counts for. A request without a user has a key of its own, so all of a tenant's count as one user.
           tenant_id || '/' || case when starts_with(user_key, 'anonymous-') then 'anonymous' else user_key end as person
    from generation
    where purpose = 'production' and proven and not decline_suppressed;

-- What became of answers. A reward out of the bounds that training has is none, and `excluded`: one such must not decide anything.
create view answer_reward with (security_invoker = true) as
    select t.generation_id, t.episode_id, t.signal, t.censor_code,
           case when reward_in_bounds(t.reward, d.definition) then t.reward end as reward,
           t.reward is not null and not reward_in_bounds(t.reward, d.definition) as excluded,
           -- the lowest and the highest that it may be, or might have been
           reward_lowest(d.definition) as lowest,
           reward_highest(d.definition) as highest
    from trajectory t
    left join reward_definition d on d.surface = t.surface and d.version = t.reward_definition;

-- The release loop compares what users did with a canary's answers and with champion's. It reads no text and no token. Adds to
-- what `grant_database_rights` grants, whatever else that is by now.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(
        replace(before, 'line, arm, replica, purpose, sampled_at)''',
            'line, arm, replica, purpose, sampled_at, user_key, finish_reason, declined, decline_suppressed,
              arm_probability, proven)'''),
        '[''control'', ''insert'', ''task, policy, tenant''],',
        '[''control'', ''insert'', ''task, policy, tenant''],
        [''control'', ''select, insert, update'', ''canary''],
        [''control'', ''select, insert'', ''canary_transition''],
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
