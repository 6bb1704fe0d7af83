-- Closes all open turns of tenant $1's episode $2 with the definition $3 and the code $4.
with turns as (
    delete from open_generation o using generation g
    where o.episode_id = $2 and g.id = o.generation_id and g.tenant_id = $1
    returning o.generation_id, o.surface, g.sampled_at
)
insert into trajectory
    (generation_id, surface, reward_definition, closes_at, censor_code, episode_id, episode_turns, closed_at)
select generation_id, surface, $3, sampled_at, $4, $2, (count(*) over ())::integer, clock.now
from turns, (select clock_timestamp() as now offset 0) as clock
