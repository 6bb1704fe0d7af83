-- What users did with the newest answers of each of some versions, by user: at most 200 answers of a version.
-- $1 policy, $2 versions, $3 tenant; null: all.
select v.serial,
       g.tenant_id as "tenant_id!",
       g.user_key as "user_key!",
       count(*) as "answers!",
       count(*) filter (where g.declined) as "declined!",
       count(t.reward) as "rewarded!",
       coalesce(sum(t.reward), 0) as "reward!"
from version v
cross join lateral (
    select g.id, g.tenant_id, g.user_key, g.declined
    from answer g
    where g.policy = v.policy and g.version = v.serial
      and g.untrainable is distinct from 'no_first_token' -- nobody saw anything
      and g.id >= first_generation_id(v.created_at - interval '1 minute')
      and ($3::text is null or g.tenant_id = $3)
    order by g.id desc
    limit 200
) g
left join answer_reward t on t.generation_id = g.id
where v.policy = $1 and v.serial = any ($2)
group by v.serial, g.tenant_id, g.user_key
