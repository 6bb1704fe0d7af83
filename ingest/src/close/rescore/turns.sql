-- The closed turns of episodes, in the order of the episodes: tenants $1, ids $2. At most $3 of each,
-- and in all. Those that closed together, and then others on surface $4.
select e.nth as "nth!", g.id as "id!", g.surface as "surface!", g.policy as "policy!", g.run_id,
       g.segment as "segment!", g.turn as "turn!", g.purpose as "purpose!", g.declined as "declined!",
       g.consent as "consent!", g.shown, g.tokens as "tokens!", g.finish_reason as "finish_reason!",
       g.sampled_at as "sampled_at!", g.finished_at, g.stored_at as "stored_at!",
       g.reward_definition as "reward_definition!", g.reward, g.censor_code, g.signal, g.feedback_at, g.closes_at,
       g.closed_at as "closed_at!", g.of_episode, g.episode_turns, g.turn_reward
from unnest($1::text[], $2::uuid[]) with ordinality as e (tenant_id, id, nth)
cross join lateral (
    select g.id, g.surface, g.policy, g.run_id, g.segment, g.turn, g.purpose, g.declined, g.consent, g.shown,
           sampled_tokens(g.version_spans) as tokens,
           g.finish_reason, g.sampled_at, g.finished_at, g.stored_at,
           t.reward_definition, t.reward, t.censor_code, t.signal, t.feedback_at, t.closes_at, t.closed_at,
           t.episode_id as of_episode, t.episode_turns, t.turn_reward
    from (
        (select t.generation_id
         from trajectory t join generation g on g.id = t.generation_id
         where t.episode_id = e.id and g.tenant_id = e.tenant_id
         limit $3)
        union all
        (select t.generation_id
         from generation g join trajectory t on t.generation_id = g.id
         where g.episode_id = e.id and g.tenant_id = e.tenant_id and t.surface = $4 and t.episode_id is null
         limit $3)
        limit $3
    ) as closed
    join generation g on g.id = closed.generation_id
    join trajectory t on t.generation_id = closed.generation_id
) g
order by e.nth
limit $3
