-- How the answers of some hours were scored, by arm. $1 policy, $2 hours back, $3 tenant; null: all. Each table has its own bound,
-- so that only the ids of that time are read.
select g.arm as "arm!",
       t.generation_id is not null as "closed!",
       t.signal,
       t.censor_code,
       count(*) as "answers!",
       sum(t.reward) as reward
from answer g
left join answer_reward t
  on t.generation_id = g.id and t.generation_id >= first_generation_id(now() - make_interval(hours => $2))
where g.policy = $1
  and g.untrainable is distinct from 'no_first_token' -- nobody saw anything
  and g.id >= first_generation_id(now() - make_interval(hours => $2))
  and ($3::text is null or g.tenant_id = $3)
group by 1, 2, 3, 4
order by 1, 5 desc
limit 500
