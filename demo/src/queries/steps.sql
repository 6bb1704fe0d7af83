-- The run's steps in order, with their metrics and the size of their delta.
-- $1 policy, $2 start of the run, $3 time of its first pause
select
    s.step,
    s.version,
    extract(epoch from s.committed_at - $3)::float8 as "at_seconds!",
    (s.metrics ->> 'trajectories')::bigint as trajectories,
    (s.metrics ->> 'entropy')::float8 as entropy,
    (s.metrics ->> 'kl')::float8 as kl,
    (s.metrics ->> 'changed_weights')::float8 / nullif((s.metrics ->> 'total_weights')::float8, 0) as density,
    v.delta_bytes::float8 / nullif(v.image_bytes, 0)::float8 as delta_ratio
from step s
join run r on r.id = s.run_id
left join version v on v.policy = r.policy and v.serial = s.version
where r.policy = $1 and r.kind = 'realtime' and s.committed_at >= $2
order by s.committed_at, s.step
