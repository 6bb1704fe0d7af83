-- Why generations of this run were dropped or censored.
-- $1 policy, $2 start of the run
select disposition as "disposition!", code as "code!", count(*) as "generations!"
from ledger
where policy = $1 and sampled_at >= $2 and generation_id >= first_generation_id($2) and code is not null and disposition in ('dropped', 'censored')
group by disposition, code
order by disposition, code
