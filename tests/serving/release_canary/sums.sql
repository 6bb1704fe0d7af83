-- $1 answers of $2 users, half of them the canary's, stored and closed within the last hour. Some are declined, some have no reward, some
-- are turns of an episode. The one in the middle still waits for its reward.
with made as (
    select i, i % $2::bigint as u, uuidv7() as id, i / $2::bigint as round from generate_series(1, $1::bigint) i
), answers as (
    select m.*, case when u % 2 = 0 then 'canary' else 'champion' end as arm,
           round % 10 in (0, 1) as is_turn,
           md5('episode ' || u || ' ' || round / 10)::uuid as episode,
           now() - interval '3400 seconds' + interval '1 second' * (3200.0 * i / $1::bigint) as stored_at,
           -- an episode closes as one
           now() - interval '3350 seconds'
               + interval '1 second' * (3200.0 * least(i + case when round % 10 = 0 then $2::bigint else 0 end, $1::bigint) / $1::bigint)
               as closed_at
    from made m
), stored as (
    insert into generation
        (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
         episode_id, turn, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
         finish_reason, declined, finished_at, sampled_at, stored_at, proven)
    select id, 'default', 'demo', case arm when 'canary' then 2 else 1 end, 1, '[[1, 7]]', '', 'realtime', 'replica', 'production',
           'completion', case when is_turn then episode else id end, round % 10, 'user ' || u, arm, 0.25, '{5}', '{6}', '{-1}', 1, 1,
           case when i % 41 = 0 then 'abort' else 'stop' end, i % 50 = 0, clock_timestamp(), clock_timestamp(), stored_at, true
    from answers
), open as (
    insert into open_generation (generation_id, surface, closes_at, proven)
    select id, 'completion', now() + interval '1 hour', true from answers where i = $1::bigint / 2
)
insert into trajectory (generation_id, surface, reward_definition, reward, censor_code, episode_id, episode_turns, closed_at)
select id, 'completion', 1, case when i % 10 = 3 and not is_turn then null else (i * 7919 % 100 < 50)::int end,
       case when i % 10 = 3 and not is_turn then 'no_feedback' end, case when is_turn then episode end, case when is_turn then 2 end, closed_at
from answers
where i <> $1::bigint / 2
