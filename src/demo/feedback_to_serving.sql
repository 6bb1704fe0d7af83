-- From a person's answer to a token by the version that trained on it.
-- For each trained trajectory that an answer decided: event time of that answer, until the first generation that the
-- version made of it sampled for a user. Trajectories whose version has answered nobody yet are counted, not guessed.
-- $1 policy, $2 when the run began
with trained as (
    select s.version, t.feedback_at
    from ledger l
    join trajectory t on t.generation_id = l.generation_id
    join step s on s.run_id = l.run_id and s.step = l.step
    where l.policy = $1
      and l.sampled_at >= $2
      and l.disposition = 'trained'
      and l.purpose = 'production'
      and t.feedback_at is not null
),
first_answer as (
    select made.version, min(g.sampled_at) as sampled_at
    from (select distinct version from trained) made
    join generation g on g.policy = $1 and g.version = made.version and g.purpose = 'production'
    group by made.version
)
select
    count(f.sampled_at) as "served!",
    count(*) - count(f.sampled_at) as "not_served!",
    percentile_cont(0.5) within group (order by extract(epoch from f.sampled_at - trained.feedback_at)::float8) as p50,
    percentile_cont(0.95) within group (order by extract(epoch from f.sampled_at - trained.feedback_at)::float8) as p95
from trained
left join first_answer f on f.version = trained.version
