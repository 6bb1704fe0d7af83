-- Closes open episodes at their end or at their first closing feedback. $1 tenants and $2 ids of
-- those that were touched; $3 surfaces that close when the episode ends; $4 surfaces that close on
-- feedback about the episode, $5 the metric of each; $6 seconds in which turns may still join, unless
-- it is known that none will; looks at the first $7 events about an episode. Not before the event and the last turn were stored: what
-- the log had by then must be in the tables.
with closing as (
    select o.episode_id, o.tenant_id, greatest(early.closes_at, o.turn_stored_at) as closes_at
    from unnest($1::text[], $2::uuid[]) as touched (tenant_id, episode_id)
    join open_episode o on o.episode_id = touched.episode_id and o.tenant_id = touched.tenant_id
    cross join lateral (
        select least(
            (select greatest(e.ended_at + make_interval(secs => case when rollout_is_complete(e.episode_id) then 0.0 else $6::double precision end),
                             e.stored_at)
             from episode_end e
             where e.tenant_id = o.tenant_id and e.episode_id = o.episode_id and o.surface = any($3)),
            (select min(greatest(f.given_at + make_interval(secs => $6), f.stored_at))
             from unnest($4::text[], $5::text[]) as s (surface, metric)
             cross join lateral (
                 select given_at, stored_at from feedback
                 where episode_id = o.episode_id and tenant_id = o.tenant_id and metric_name = s.metric
                 order by given_at, id limit $7
             ) f
             where s.surface = o.surface)
        ) as closes_at
    ) early
    where early.closes_at is not null and not o.is_full
    order by o.episode_id, o.tenant_id
    for no key update of o
)
update open_episode o set closes_at = closing.closes_at
from closing
where o.episode_id = closing.episode_id and o.tenant_id = closing.tenant_id and closing.closes_at < o.closes_at
