-- Traffic of each arm over the run, by period. A generation belongs to the period in which it was
-- sampled.
-- $1 policy, $2 start of the run, $3 time of its first pause, $4 length of a period in seconds,
-- $5 number of the last period, which also takes everything later
select
    least(greatest(floor(extract(epoch from g.sampled_at - $3) / $4::float8), 0), $5)::int as "period!",
    g.arm as "arm!",
    count(*) as "generations!",
    count(t.generation_id) as "closed!",
    count(t.censor_code) as "censored!",
    count(*) filter (where d.kind = 'dropped' and d.code = 'stale') as "stale!",
    avg(cardinality(g.token_ids)) filter (where not g.declined)::float8 as tokens_mean
from generation g
left join trajectory t on t.generation_id = g.id
left join disposition d on d.generation_id = g.id
where g.policy = $1 and g.sampled_at >= $2 and g.id >= first_generation_id($2) and g.purpose = 'production'
group by 1, 2
order by 1, 2
