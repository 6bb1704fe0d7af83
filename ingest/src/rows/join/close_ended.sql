-- Closes generations at the end of their episode. $1 generations and $2 episodes that were touched;
-- $3 surfaces that close when the episode ends.
update open_generation o
set closes_at = greatest(e.ended_at, g.sampled_at)
from generation g
join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
where (g.id = any($1) or g.episode_id = any($2)) and g.surface = any($3)
  and o.generation_id = g.id and greatest(e.ended_at, g.sampled_at) < o.closes_at
