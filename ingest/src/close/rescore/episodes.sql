-- Episodes whose first closed turn on surface $1 has an id between $2 and $3, in the order of these
-- turns, of tenant $4 (null: all), at most $5.
select g.id as "first_id!", g.tenant_id as "tenant_id!", g.episode_id as "episode_id!",
       e.ended_at as "ended_at?", e.stored_at as "end_stored_at?"
from trajectory t
join generation g on g.id = t.generation_id
left join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
where t.surface = $1
  and t.generation_id > $2 and t.generation_id < $3
  and g.id > $2 and g.id < $3
  and ($4::text is null or g.tenant_id = $4)
  and not exists (select from generation earlier
                  join trajectory c on c.generation_id = earlier.id
                  where earlier.episode_id = g.episode_id and earlier.tenant_id = g.tenant_id and earlier.id < g.id
                    and c.surface = $1)
order by t.generation_id
limit $5
