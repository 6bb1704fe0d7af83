-- The share of champion's answers that users left. $1 policy, $2 version, $3 the share of champion's users, $4: since when.
select coalesce(avg((finish_reason = 'abort' and untrainable is distinct from 'engine_failed')::int), 0)::double precision as "left!"
from answer
where policy = $1 and arm = 'champion' and version = $2
  and abs(arm_probability - $3::double precision) < 1e-5
  and tenant_id in (select coalesce((select tenant_id from policy where name = $1), 'default')
                    union all
                    select tenant_id from tenant_consent where policy = $1 and withdrawn_at is null)
  and id >= first_generation_id($4)
