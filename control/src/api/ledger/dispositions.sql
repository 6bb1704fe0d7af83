-- Counts generations by disposition. $1 policy, $2 purpose, $3 sampled since, $4 tenant;
-- null: any.
select disposition as "disposition!", code, count(*) as "count!"
from ledger
where ($1::text is null or policy = $1)
  and ($2::text is null or purpose = $2)
  and generation_id >= first_generation_id(coalesce($3::timestamptz, 'epoch'))
  and ($3::timestamptz is null or sampled_at >= $3)
  and ($4::text is null or tenant_id = $4)
group by disposition, code
order by disposition, code
