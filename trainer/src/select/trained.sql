-- Whom the newest trained trajectories of a run come from, newest first. Parameters: run, maximum
-- rows.
select g.tenant_id, g.user_key, g.surface
from disposition d
join generation g on g.id = d.generation_id
where d.run_id = $1 and d.kind = 'trained'
order by d.step desc
limit $2
