-- The closed turns of episodes, in the order of the episodes: tenants $1, ids $2. At most $3 of each,
-- and in all. Those on surface $4, and those of other surfaces that closed with them.
select e.nth as "nth!", g.id as "id!", g.surface as "surface!", g.policy as "policy!", g.run_id,
       g.segment as "segment!", g.turn as "turn!", g.purpose as "purpose!", g.declined as "declined!",
       g.consent as "consent!", g.shown, g.tokens as "tokens!", g.finish_reason as "finish_reason!",
       g.sampled_at as "sampled_at!", g.finished_at, g.stored_at as "stored_at!",
       g.reward_definition as "reward_definition!", g.reward, g.censor_code, g.signal, g.feedback_at, g.closes_at,
       g.closed_at as "closed_at!", g.of_episode, g.episode_turns, g.turn_reward
from unnest($1::text[], $2::uuid[]) with ordinality as e (tenant_id, id, nth)
cross join lateral (
    select g.id, g.surface, g.policy, g.run_id, g.segment, g.turn, g.purpose, g.declined, g.consent, g.shown,
           (select coalesce(sum(case when jsonb_typeof(span -> 1) = 'number' then (span ->> 1)::numeric end), 0)::bigint
            from jsonb_path_query(g.version_spans, '$[*]') span) as tokens,
           g.finish_reason, g.sampled_at, g.finished_at, g.stored_at,
           t.reward_definition, t.reward, t.censor_code, t.signal, t.feedback_at, t.closes_at, t.closed_at,
           t.episode_id as of_episode, t.episode_turns, t.turn_reward
    from generation g
    join trajectory t on t.generation_id = g.id
    where g.episode_id = e.id and g.tenant_id = e.tenant_id and (t.surface = $4 or t.episode_id is not null)
    limit $3
) g
order by e.nth
limit $3
