-- Closes generations that are trajectories at their first closing feedback. $1 generations and, of
-- tenants $2, episodes $3 that were touched; $4 surfaces that close on feedback, $5 the metric of each.
-- Not before the feedback and the generation were stored: what the log had by then must be in the
-- tables.
--
-- Begins with what is open, and looks at the newest 256 generations of an episode and the first $6
-- events about a target: anyone may log any number. What it does not find closes at its horizon,
-- with the same reward.
with touched as materialized (
    select generation_id, surface from open_generation
    where generation_id = any($1) and episode_id is null
    union
    select o.generation_id, o.surface
    from unnest($2::text[], $3::uuid[]) as e (tenant_id, id)
    cross join lateral (
        select id from generation where episode_id = e.id and tenant_id = e.tenant_id order by id desc limit 256
    ) g
    join open_generation o on o.generation_id = g.id and o.episode_id is null
)
update open_generation o
set closes_at = decided.closes_at
from (
    select t.generation_id, greatest(first.at, g.stored_at) as closes_at
    from touched t
    join unnest($4::text[], $5::text[]) as s (surface, metric) on s.surface = t.surface
    join generation g on g.id = t.generation_id
    cross join lateral (
        select min(greatest(f.given_at, f.stored_at)) as at from (
            (select given_at, stored_at from feedback
             where generation_id = g.id and tenant_id = g.tenant_id and metric_name = s.metric
             order by given_at, id limit $6)
            union all
            (select given_at, stored_at from feedback
             where episode_id = g.episode_id and tenant_id = g.tenant_id and metric_name = s.metric
             order by given_at, id limit $6)
        ) f
    ) first
    where first.at is not null
) decided
where o.generation_id = decided.generation_id and decided.closes_at < o.closes_at
  and o.episode_id is null
