-- Counts deleted generations by the disposition that they had. $1 policy, $2 purpose, $3 sampled
-- since, from the start of that day, $4 tenant; null: any.
select disposition, nullif(code, '') as code, sum(generations)::bigint as "count!"
from expired_generation
where ($1::text is null or policy = $1)
  and ($2::text is null or purpose = $2)
  and ($3::timestamptz is null or day >= ($3::timestamptz at time zone 'utc')::date)
  and ($4::text is null or tenant_id = $4)
group by disposition, code
order by disposition, code
