-- The recent show rate of each arm: of the newest $4 production generations since $2, at most the
-- newest $3 of each arm. Excludes generations that exploration forced to show and those whose
-- caller disconnected, because neither reflects the policy's choice. Parameters: policy, oldest
-- generation id, generations per arm, maximum rows.
with newest as (
    select id, arm, declined, exploration_share
    from generation
    where policy = $1
      and purpose = 'production'
      and id >= $2
      and not decline_suppressed
      and tenant_id = any ((select consenting_tenants($1))::text[])
      and finish_reason <> 'abort'
    order by id desc
    limit $4
),
numbered as (
    select *, row_number() over (partition by arm order by id desc) as nth from newest
)
select n.arm,
       count(*) as "generations!",
       count(*) filter (where not n.declined) as "shown!",
       count(t.generation_id) filter (where not n.declined) as "closed!",
       count(t.censor_code) filter (where not n.declined) as "unscored!",
       coalesce(max(n.exploration_share), 0)::real as "explore!"
from numbered n
left join trajectory t on t.generation_id = n.id
where n.nth <= $3
group by n.arm
