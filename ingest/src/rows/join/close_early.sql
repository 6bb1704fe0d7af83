-- Closes generations at their first closing feedback. $1 generations and $2 episodes that were
-- touched; $3 surfaces that close on feedback, $4 the metric of each.
update open_generation o
set closes_at = decided.given_at
from (
    select g.id, min(f.given_at) as given_at
    from generation g
    join unnest($3::text[], $4::text[]) as s (surface, metric) on s.surface = g.surface
    cross join lateral (
        select given_at from feedback
        where generation_id = g.id and tenant_id = g.tenant_id and metric_name = s.metric
        union all
        select given_at from feedback
        where episode_id = g.episode_id and tenant_id = g.tenant_id and metric_name = s.metric
    ) f
    where g.id = any($1) or g.episode_id = any($2)
    group by g.id
) decided
where o.generation_id = decided.id and decided.given_at < o.closes_at
