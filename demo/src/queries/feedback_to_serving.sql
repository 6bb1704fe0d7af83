-- Time from feedback to the first token of the version that trained on it: from the event time of
-- the deciding feedback until that version's first production generation. If a version has not
-- served yet, its trajectories are only counted. Starts from the steps and uses indexes, because
-- the tables also hold earlier runs.
-- $1 policy, $2 start of the run
with trained as (
    select s.version, t.feedback_at
    from run r
    join step s on s.run_id = r.id
    join disposition d on d.run_id = s.run_id and d.step = s.step and d.kind = 'trained'
    join trajectory t on t.generation_id = d.generation_id
    join generation g on g.id = d.generation_id
    where r.policy = $1
      and s.committed_at >= $2
      and g.id >= first_generation_id($2)
      and g.sampled_at >= $2
      and g.purpose = 'production'
      and t.feedback_at is not null
),
first_answer as (
    select made.version, f.sampled_at
    from (select distinct version from trained) made
    cross join lateral (
        select g.sampled_at
        from generation g
        where g.policy = $1 and g.version = made.version and g.purpose = 'production'
        order by g.id
        limit 1
    ) f
)
select
    count(f.sampled_at) as "served!",
    count(*) - count(f.sampled_at) as "not_served!",
    percentile_cont(0.5) within group (order by extract(epoch from f.sampled_at - trained.feedback_at)::float8) as p50,
    percentile_cont(0.95) within group (order by extract(epoch from f.sampled_at - trained.feedback_at)::float8) as p95
from trained
left join first_answer f on f.version = trained.version
