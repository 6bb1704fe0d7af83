-- Warnings and errors of the realtime run, and the events that end an alarm.
-- $1 policy, $2 start of the run, $3 time of its first pause
select extract(epoch from e.at - $3)::float8 as "at_seconds!", e.message
from run_event e
join run r on r.id = e.run_id
where r.policy = $1 and r.kind = 'realtime' and e.at >= $2
  and (e.level <> 'info' or e.data ? 'alarm')
order by e.id
