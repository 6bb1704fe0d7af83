-- Counts stored generations. Independent of the view `ledger`, so that its sums can be checked.
-- $1 policy, $2 purpose, $3 sampled since, $4 tenant; null: any.
select count(*) as "count!"
from generation
where ($1::text is null or policy = $1)
  and ($2::text is null or purpose = $2)
  and id >= first_generation_id(coalesce($3::timestamptz, 'epoch'))
  and ($3::timestamptz is null or sampled_at >= $3)
  and ($4::text is null or tenant_id = $4)
