-- Splits the time that feedback_to_serving.sql measures into consecutive phases, for the same
-- trajectories. Each time is from the clock of the machine that recorded it.
-- $1 policy, $2 start of the run
with trained as (
    select s.run_id, s.step, s.version, s.committed_at, t.feedback_at, t.closed_at,
           coalesce((s.metrics ->> 'computed_at')::timestamptz, s.committed_at) as computed_at
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
-- A cohort is full once its last trajectory has closed, with feedback or without.
cohort as (
    select d.run_id, d.step, max(t.closed_at) as full_at
    from (select distinct run_id, step from trained) made
    join disposition d on d.run_id = made.run_id and d.step = made.step and d.kind = 'trained'
    join trajectory t on t.generation_id = d.generation_id
    group by d.run_id, d.step
),
first_swap as (
    select version, min(at) as at from swap where policy = $1 group by version
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
select phase.name as "name!",
       percentile_cont(0.5) within group (order by extract(epoch from phase.took)::float8) as "p50!",
       percentile_cont(0.95) within group (order by extract(epoch from phase.took)::float8) as "p95!"
from trained
join cohort on cohort.run_id = trained.run_id and cohort.step = trained.step
join first_swap on first_swap.version = trained.version
join first_answer on first_answer.version = trained.version
cross join lateral (values
    (1, 'horizon', trained.closed_at - trained.feedback_at),         -- until the trajectory closed
    (2, 'collection', cohort.full_at - trained.closed_at),           -- until the cohort was full
    (3, 'step', trained.computed_at - cohort.full_at),               -- until the update was computed and had passed its guards
    (4, 'publish', trained.committed_at - trained.computed_at),      -- until the version was in the store and committed
    (5, 'swap', first_swap.at - trained.committed_at),               -- until a replica served it
    (6, 'first token', first_answer.sampled_at - first_swap.at)      -- until the first request
) as phase (number, name, took)
group by phase.number, phase.name
order by phase.number
