-- Open generations that are trajectories and whose close time has passed, oldest first. Skips those
-- that another closer has locked. $1 time, $2 maximum rows.
select o.generation_id, g.episode_id, o.surface, o.closes_at, g.purpose, g.declined, g.consent, g.shown,
       (select coalesce(sum(case when jsonb_typeof(span -> 1) = 'number' then (span ->> 1)::numeric end), 0)::bigint
        from jsonb_path_query(g.version_spans, '$[*]') span) as "tokens!",
       g.finish_reason, g.sampled_at, g.finished_at, e.ended_at as "ended_at?"
from open_generation o
join generation g on g.id = o.generation_id
left join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
where o.episode_id is null and o.closes_at <= $1
order by o.closes_at
limit $2
for update of o skip locked
