-- What a step was trained on, by tenant and arm. $1 run, $2 step, $3 tenant; null: all.
select g.tenant_id as "tenant!",
       g.arm as "arm!",
       count(*) as "generations!",
       min(g.sampled_at) as "first_sampled_at!",
       max(g.sampled_at) as "last_sampled_at!"
from trajectory_use u
join generation g on g.id = u.generation_id
where u.run_id = $1 and u.step = $2 and u.purpose = 'trained' and ($3::text is null or g.tenant_id = $3)
group by g.tenant_id, g.arm
order by count(*) desc, g.tenant_id, g.arm
