-- What users did with the answers of a canary and of the version it is compared with: one row per side, period of one share,
-- and user. $4: the shares of the periods, of champion's users, who are $5 of all; $6, $7: from when until when; $8: seconds
-- after which an answer is slow, or null.
--
-- An answer belongs to the period whose probabilities it was drawn with, not to the time: replicas take a new assignment
-- seconds after it was written. So requests that name an alias, whose probability is 1, belong to none.
select g.arm = 'canary' as "is_canary!",
       period.number as "period!",
       g.user_key,
       (array_agg(g.id order by g.id))[1] as "first!",
       (array_agg(g.finish_reason = 'abort' order by g.id))[1] as "first_aborted!",
       count(*) as "answers!",
       count(*) filter (where g.declined) as "declined!",
       count(*) filter (where g.finish_reason = 'abort') as "aborted!",
       count(*) filter (where g.finished_at - g.sampled_at > make_interval(secs => $8)) as "slow!",
       count(*) filter (where not g.declined and g.finish_reason <> 'abort') as "whole!",
       coalesce(sum(sampled_tokens(g.version_spans)) filter (where not g.declined and g.finish_reason <> 'abort'), 0)::bigint
           as "tokens!",
       count(t.reward) as "rewarded!",
       count(t.censor_code) as "unscored!",
       coalesce(sum(t.reward), 0) as "reward!"
from generation g
join unnest($4::double precision[]) with ordinality as period (share, number)
     on abs(g.arm_probability - $5 * case when g.arm = 'canary' then period.share else 1 - period.share end) < 1e-5
left join trajectory t on t.generation_id = g.id
where g.policy = $1
  and g.purpose = 'production'
  and (g.arm = 'canary' and g.version = $2 or g.arm = 'champion' and g.version = $3)
  and g.arm_probability < 1
  and g.proven                  -- a replica sampled it, and nobody made it up
  and not g.decline_suppressed  -- an answer that was forced is not the policy's own
  -- users of the policy's tenant, and of tenants that consent
  and g.tenant_id in (select coalesce((select tenant_id from policy where name = $1), 'default')
                      union all
                      select tenant_id from tenant_consent where policy = $1 and withdrawn_at is null)
  and g.id >= first_generation_id($6)
  and g.sampled_at >= $6
  and g.sampled_at < $7
group by 1, 2, 3
