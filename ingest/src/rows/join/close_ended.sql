-- Closes generations that are trajectories at the end of their episode. $1 generations and $2 episodes that were touched;
-- $3 surfaces that close when the episode ends. Not before the end and the generation were stored:
-- what the log had by then must be in the tables.
update open_generation o
set closes_at = ended.closes_at
from (
    select g.id, greatest(e.ended_at, e.stored_at, g.sampled_at, g.stored_at) as closes_at
    from generation g
    join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
    where (g.id = any($1) or g.episode_id = any($2)) and g.surface = any($3)
) ended
where o.generation_id = ended.id and ended.closes_at < o.closes_at
  and o.episode_id is null
