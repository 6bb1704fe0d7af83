-- The open turns of episodes, in the order of the episodes: tenants $1, ids $2. At most $3 of each,
-- and in all.
select e.nth as "nth!", g.id as "id!", g.surface as "surface!", g.policy as "policy!", g.run_id,
       g.segment as "segment!", g.turn as "turn!", g.purpose as "purpose!", g.declined as "declined!",
       g.consent as "consent!", g.shown, g.tokens as "tokens!", g.finish_reason as "finish_reason!",
       g.sampled_at as "sampled_at!", g.finished_at, g.stored_at as "stored_at!"
from unnest($1::text[], $2::uuid[]) with ordinality as e (tenant_id, id, nth)
cross join lateral (
    select g.id, g.surface, g.policy, g.run_id, g.segment, g.turn, g.purpose, g.declined, g.consent, g.shown,
           sampled_tokens(g.version_spans) as tokens,
           g.finish_reason, g.sampled_at, g.finished_at, g.stored_at
    from open_generation o
    join generation g on g.id = o.generation_id and g.tenant_id = e.tenant_id
    where o.episode_id = e.id
    limit $3
) g
order by e.nth
limit $3
