-- Whom the newest trained trajectories of a run come from, newest first: of a page of whole steps.
-- An episode is one trajectory; each name is the one that most of its turns have. Parameters: run,
-- how many trained generations a page has at least, oldest time, the step before which it begins.
select newest.step as "step!", newest.decided_at as "decided_at!", g.tenant_id as "tenant_id!",
       mode() within group (order by g.user_key collate "C") as "user_key!",
       mode() within group (order by g.surface collate "C") as "surface!",
       mode() within group (order by g.replica collate "C") as "replica!"
from (
    select generation_id, step, decided_at
    from disposition
    where run_id = $1 and kind = 'trained' and step < $4
    order by step desc
    fetch first $2 rows with ties
) as newest
join generation g on g.id = newest.generation_id
join trajectory t on t.generation_id = g.id
where newest.decided_at >= $3
  -- who has withdrawn the consent weighs nothing any more
  and g.tenant_id = any ((select consenting_tenants(r.policy) from run r where r.id = $1)::text[])
group by newest.step, newest.decided_at, g.tenant_id, t.episode_id, case when t.episode_id is null then g.id end
order by newest.step desc
