-- Unseen answers of a canary, each with the answer of champion to the same request: one row per side and user. An unseen answer has
-- the arm 'shadow', is an evaluation, and its group is the id of champion's answer. Rewards of unseen answers say nothing.
-- $4: the share of champion's users; $5, $6: from when until when.
--
-- What was cut off is left out, with the other answer.
with pair as (
    select u.id, u.group_id::uuid as seen
    from generation u
    where u.policy = $1 and u.arm = 'shadow' and u.purpose = 'evaluation' and u.version = $2
      and u.group_id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
      and abs(u.arm_probability - $4::double precision) < 1e-5
      and (u.finish_reason <> 'abort' or u.untrainable = 'engine_failed')
      and u.proven                  -- a replica sampled it, and nobody made it up
      -- users of the policy's tenant, and of tenants that consent
      and u.tenant_id in (select coalesce((select tenant_id from policy where name = $1), 'default')
                          union all
                          select tenant_id from tenant_consent where policy = $1 and withdrawn_at is null)
      and u.id >= first_generation_id($5)
      and u.sampled_at < $6
),
answered as (
    select p.id, p.seen
    from pair p
    join answer g on g.id = p.seen
    where g.policy = $1 and g.arm = 'champion' and g.version = $3
)
select g.arm = 'shadow' as "is_canary!",
       1::bigint as "period!",
       g.tenant_id || '/' || case when starts_with(g.user_key, 'anonymous-') then 'anonymous' else g.user_key end as "user_key!",
       (array_agg(g.id order by g.id))[1] as first,
       (array_agg(g.finish_reason = 'abort' order by g.id))[1] as "first_aborted!",
       count(*) as "answers!",
       count(*) filter (where g.declined) as "declined!",
       count(*) filter (where g.finish_reason = 'abort') as "aborted!",
       0::bigint as "slow!",
       count(*) filter (where not g.declined and g.finish_reason <> 'abort') as "whole!",
       coalesce(sum(sampled_tokens(g.version_spans)) filter (where not g.declined and g.finish_reason <> 'abort'), 0)::bigint
           as "tokens!",
       0::bigint as "rewarded!",
       0::bigint as "unscored!",
       0::bigint as "excluded!",
       0::double precision as "reward!",
       0::double precision as "lowest!",
       0::double precision as "highest!"
from answered a
cross join lateral (values (a.id), (a.seen)) as side (id)
join generation g on g.id = side.id
group by 1, 2, 3
