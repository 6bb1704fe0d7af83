-- Answers of two equal versions, half of champion's users each; champion has half of all users. $1: a seed.
-- - 200 users of each side have a session. Half of the sessions are worth 1 and half 0. The canary's good ones have one turn and its bad
--   ones six; champion's the other way round.
-- - One user of each side has a reward of 1e12.
-- - A caller without a name makes many requests, of which none is scored.
-- - On each side an answer waits for its reward, and a younger one with another reward has closed.
with session as (
    select side.arm, side.version, n as number, n % 2 = 0 as is_good, gen_random_uuid() as episode,
           case when (n % 2 = 0) = (side.arm = 'canary') then 1 else 6 end as turns
    from (values ('canary', 2), ('champion', 1)) as side (arm, version), generate_series(1, 200) n
), turn as (
    select uuidv7() as id, s.*, t as turn, 'user ' || $1::int || s.arm || s.number as user_key
    from session s, generate_series(1, s.turns) t
), other as (
    select uuidv7(case when kind = 'waits' then interval '1 second' when kind = 'young' then interval '2 seconds'
                       else interval '0' end) as id,
           side.arm, side.version, kind, case kind when 'nameless' then 'anonymous-' || gen_random_uuid() else 'user ' || side.arm || '1' end
           as user_key
    from (values ('canary', 2), ('champion', 1)) as side (arm, version),
         lateral (select 'huge' as kind union all select 'waits' union all select 'young'
                  union all select 'nameless' from generate_series(1, 50)) as kinds
), made as (
    select id, arm, version, user_key, episode, turn from turn
    union all
    select id, arm, version, user_key, gen_random_uuid(), 1 from other
), stored as (
    insert into generation
        (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
         episode_id, turn, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
         finish_reason, declined, finished_at, sampled_at, proven)
    select id, 'default', 'demo', version, version, '[]', '', 'realtime', 'replica', 'production', 'completion',
           episode, turn, user_key, arm, 0.25, '{5}', '{6}', '{-1}', 1, 1, 'stop', false, clock_timestamp(), clock_timestamp(), true
    from made
), open as (
    insert into open_generation (generation_id, surface, closes_at, proven)
    select id, 'completion', now() + interval '1 hour', true from other where kind = 'waits'
)
insert into trajectory (generation_id, surface, reward_definition, reward, episode_id, episode_turns)
select id, 'completion', 1, is_good::int, episode, turns from turn
union all
select id, 'completion', 1, case kind when 'huge' then 1e12 else -1 end, null, null from other where kind in ('huge', 'young')
