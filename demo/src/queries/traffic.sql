-- What the tables say of each arm over the course of the run, by the stretch in which a generation was sampled.
-- $1 policy, $2 when the run began, $3 when its first pause was, $4 length of a stretch in seconds, $5 the last stretch,
-- which takes all that came later
select
    least(greatest(floor(extract(epoch from g.sampled_at - $3) / $4::float8), 0), $5)::int as "stretch!",
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
