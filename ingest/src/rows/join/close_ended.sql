-- Closes generations that are trajectories at the end of their episode. $1 generations and, of tenants
-- $2, episodes $3 that were touched; $4 surfaces that close when the episode ends. Not before the end
-- and the generation were stored: what the log had by then must be in the tables. Begins with what is
-- open, and looks at the newest 256 generations of an episode (see close_early.sql).
with touched as materialized (
    select generation_id from open_generation
    where generation_id = any($1) and episode_id is null and surface = any($4)
    union
    select o.generation_id
    from unnest($2::text[], $3::uuid[]) as e (tenant_id, id)
    cross join lateral (
        select id from generation where episode_id = e.id and tenant_id = e.tenant_id order by id desc limit 256
    ) g
    join open_generation o on o.generation_id = g.id and o.episode_id is null and o.surface = any($4)
)
update open_generation o
set closes_at = ended.closes_at
from (
    select g.id, greatest(e.ended_at, e.stored_at, g.sampled_at, g.stored_at) as closes_at
    from touched t
    join generation g on g.id = t.generation_id
    join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
) ended
where o.generation_id = ended.id and ended.closes_at < o.closes_at
  and o.episode_id is null
