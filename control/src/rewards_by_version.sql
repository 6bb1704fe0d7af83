-- As rewards.sql, with the newest answers of some versions in place of periods.
-- $1 policy, $2 arm (null: all), $3 versions, $4 tenant (null: all), $5 answers of a version at most, $6 surface (null: all).
select asked.number as "period!",
       g.tenant_id as "tenant_id!",
       g.user_key as "user_key!",
       min(g.version) as "first_version!",
       max(g.version) as "last_version!",
       count(*) filter (where g.untrainable is distinct from 'no_first_token') as "answers!",
       count(*) filter (where g.declined) as "declined!",
       count(*) filter (where g.finish_reason = 'abort' and g.untrainable is distinct from 'no_first_token') as "aborted!",
       count(*) filter (where g.untrainable = 'no_first_token') as "not_begun!",
       count(t.reward) as "scored!",
       coalesce(sum(t.reward), 0) as "reward!",
       array_agg(g.id) as "ids!"
from unnest($3::bigint[]) with ordinality as asked (version, number)
join version v on v.policy = $1 and v.serial = asked.version
cross join lateral (
    select g.id, g.tenant_id, g.user_key, g.version, g.declined, g.finish_reason, g.untrainable
    from answer g
    where g.policy = $1 and g.version = v.serial
      and ($2::text is null or g.arm = $2)
      and g.id >= first_generation_id(v.created_at - interval '1 minute')
      and ($4::text is null or g.tenant_id = $4)
      and ($6::text is null or g.surface = $6)
    order by g.id desc
    limit $5
) g
left join lateral (select t.reward from answer_reward t where t.generation_id = g.id limit 1) t on true
group by asked.number, g.tenant_id, g.user_key
