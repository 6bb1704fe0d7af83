-- Median time from feedback to the first token of the version that trained on it, over the
-- trajectories of the last five steps whose version has served. Runs often, so it only uses
-- indexes.
-- $1 policy, $2 start of the run
select percentile_cont(0.5) within group (order by extract(epoch from f.sampled_at - t.feedback_at)::float8) as p50
from (select s.run_id, s.step, s.version
      from step s
      join run r on r.id = s.run_id
      where r.policy = $1 and r.kind = 'realtime' and s.committed_at >= $2
      order by s.committed_at desc
      limit 5) s
cross join lateral (
    select g.sampled_at
    from generation g
    where g.policy = $1 and g.version = s.version and g.purpose = 'production'
    order by g.id
    limit 1
) f
join disposition d on d.run_id = s.run_id and d.step = s.step and d.kind = 'trained'
join trajectory t on t.generation_id = d.generation_id
where t.feedback_at is not null
