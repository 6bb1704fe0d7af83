-- Warnings and errors of the realtime run, such as that its arm has fallen silent, and that it shows again.
-- $1 policy, $2 when the run began, $3 when its first pause was
select extract(epoch from e.at - $3)::float8 as "at_seconds!", e.message
from run_event e
join run r on r.id = e.run_id
where r.policy = $1 and r.kind = 'realtime' and e.at >= $2
  and (e.level <> 'info' or e.data ? 'alarm')
order by e.id
