-- Notes the trajectories that closed in a time. $1: the canary; $2 to $9: as in canary_answers; $10, $11: closed from when until when.
-- All turns of an episode close at once.
insert into canary_closed (canary_id, generation_id, surface, is_canary, period, person, tenant_id, reward, excluded, lowest, highest)
select distinct on (coalesce(t.episode_id, t.generation_id))
       $1, d.id, d.surface, d.is_canary, d.period, d.person, d.tenant_id, t.reward, t.excluded, t.lowest, t.highest
from answer_reward t
join canary_answers($2, $3, $4, $5, $6, $7, $8, $9) d on d.id = t.generation_id
where t.closed_at >= $10 and t.closed_at < $11
  and t.generation_id >= first_generation_id($7)
  -- a turn that its session did not take is no trajectory
  and t.censor_code is distinct from 'late_turn'
order by coalesce(t.episode_id, t.generation_id), d.id desc
