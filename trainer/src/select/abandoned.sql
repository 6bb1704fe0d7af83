-- Drops rollouts whose run ended without training on them. Parameters: policy, maximum rows.
insert into disposition (generation_id, kind, code, run_id)
select g.id, 'dropped', 'run_ended', g.run_id
from generation g
join trajectory t on t.generation_id = g.id
join run r on r.id = g.run_id
where g.policy = $1
  and g.purpose = 'rollout'
  and t.reward is not null
  and r.status in ('succeeded', 'failed', 'cancelled')
  and not exists (select from disposition d where d.generation_id = g.id)
order by g.id
limit $2
on conflict (generation_id) do nothing
