-- What a run dropped between two moments, by code. $1 run, $2 and $3 the moments, $4 the earliest sampling that is looked at.
select code as "code!", count(*) as "generations!"
from disposition
where run_id = $1 and kind = 'dropped' and decided_at > $2 and decided_at <= $3
  and generation_id >= first_generation_id($4) and generation_id < first_generation_id($3)
group by code
order by count(*) desc, code
