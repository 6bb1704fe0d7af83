-- Open generations that are trajectories and whose close time has passed, oldest first. Skips those
-- that another closer has locked. $1 time, $2 maximum rows; after $3 and $4, the place of one.
select o.generation_id, g.tenant_id, g.episode_id, g.stored_at, o.surface, o.closes_at, o.stray, g.purpose, g.declined, g.consent, g.shown,
       sampled_tokens(g.version_spans) as "tokens!",
       g.finish_reason, g.sampled_at, g.finished_at, e.ended_at as "ended_at?"
from open_generation o
join generation g on g.id = o.generation_id
left join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
where o.episode_id is null and o.closes_at <= $1 and (o.closes_at, o.generation_id) > ($3, $4::uuid)
order by o.closes_at, o.generation_id
limit $2
for update of o skip locked
