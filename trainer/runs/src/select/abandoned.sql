-- Drops rollouts whose run ended without training on them, and those of which their run knows nothing,
-- because anybody may log a run's id. Parameters: policy, maximum rows.
insert into disposition (generation_id, kind, code, run_id)
select g.id, 'dropped', case when r.status in ('succeeded', 'failed', 'cancelled') then 'run_ended' else 'unknown_run' end, r.id
from generation g
join trajectory t on t.generation_id = g.id
left join run r on r.id = g.run_id
where g.policy = $1
  and g.purpose = 'rollout'
  and t.reward is not null
  and (r.id is null
       or r.kind <> 'grpo'
       or r.status in ('succeeded', 'failed', 'cancelled')
       or not exists (select from rollout o where o.id = g.episode_id and o.run_id = r.id))
  and not exists (select from disposition d where d.generation_id = g.id)
order by g.id
limit $2
on conflict (generation_id) do nothing
