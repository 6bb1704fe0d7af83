-- Open episodes that are due at $1, oldest first, at most $2, after $3 and $4, the place of one. Skips those that a sink or another
-- closer has locked, and all but one of those that share an id, of several tenants. At $5, a later time, those are due already
-- that nobody will add anything to.
select o.tenant_id, o.episode_id, o.closes_at, o.turns, o.is_full, e.ended_at as "ended_at?",
       episode_closed(o.tenant_id, o.episode_id) as "has_closed!", rollout_is_complete(o.episode_id) as "is_complete!"
from open_episode o
left join episode_end e on e.tenant_id = o.tenant_id and e.episode_id = o.episode_id
where o.closes_at <= $5 and (o.closes_at <= $1 or rollout_is_complete(o.episode_id)) and (o.closes_at, o.episode_id) > ($3, $4::uuid)
  and not exists (select from open_episode other
                  where other.episode_id = o.episode_id and other.tenant_id < o.tenant_id and other.closes_at <= $5)
order by o.closes_at, o.episode_id
limit $2
for update of o skip locked
