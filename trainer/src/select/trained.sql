-- Whom the newest trained trajectories of a run come from, newest first. Parameters: run, maximum
-- rows, oldest time.
select g.tenant_id, g.user_key, g.surface, g.replica, newest.decided_at
from (
    select generation_id, step, decided_at
    from disposition
    where run_id = $1 and kind = 'trained'
    order by step desc
    limit $2
) as newest
join generation g on g.id = newest.generation_id
where newest.decided_at >= $3
  -- who has withdrawn the consent weighs nothing any more
  and g.tenant_id = any ((select consenting_tenants(r.policy) from run r where r.id = $1)::text[])
order by newest.step desc
