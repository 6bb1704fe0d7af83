-- What users did with the newest answers of an arm in each period, by user.
-- $1 policy, $2 arm, $3 and $4 begins and ends of the periods, $5 tenant (null: all), $6 answers of a period at most, $7 surface
-- (null: all).
select period.number as "period!",
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
from unnest($3::timestamptz[], $4::timestamptz[]) with ordinality as period (begins, ends, number)
cross join lateral (
    select g.id, g.tenant_id, g.user_key, g.version, g.declined, g.finish_reason, g.untrainable
    from answer g
    where g.policy = $1 and g.arm = $2
      and g.id >= first_generation_id(period.begins) and g.id < first_generation_id(period.ends)
      and ($5::text is null or g.tenant_id = $5)
      and ($7::text is null or g.surface = $7)
    order by g.id desc
    limit $6
) g
-- Looked up one by one: on a large table, a join would read it from end to end.
left join lateral (select t.reward from answer_reward t where t.generation_id = g.id limit 1) t on true
group by period.number, g.tenant_id, g.user_key
