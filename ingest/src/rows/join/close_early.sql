-- Closes generations that are trajectories at their first closing feedback. $1 generations and $2 episodes that were
-- touched; $3 surfaces that close on feedback, $4 the metric of each. Not before the feedback and
-- the generation were stored: what the log had by then must be in the tables.
update open_generation o
set closes_at = decided.closes_at
from (
    select g.id, greatest(min(greatest(f.given_at, f.stored_at)), g.stored_at) as closes_at
    from generation g
    join unnest($3::text[], $4::text[]) as s (surface, metric) on s.surface = g.surface
    cross join lateral (
        select given_at, stored_at from feedback
        where generation_id = g.id and tenant_id = g.tenant_id and metric_name = s.metric
        union all
        select given_at, stored_at from feedback
        where episode_id = g.episode_id and tenant_id = g.tenant_id and metric_name = s.metric
    ) f
    where g.id = any($1) or g.episode_id = any($2)
    group by g.id, g.stored_at
) decided
where o.generation_id = decided.id and decided.closes_at < o.closes_at
  and o.episode_id is null
