-- The unseen answers of a canary, and those of the version that it is compared with: one row per side and user. Unseen answers have
-- the arm 'shadow', are evaluations, and their rewards say nothing. $4: the share of champion's users; $5, $6: from when until
-- when.
--
-- What users did not wait for is repeated by nobody, so it is left out. An unseen answer that took too long is left out, too.
select g.arm = 'shadow' as "is_canary!",
       1::bigint as "period!",
       g.user_key,
       (array_agg(g.id order by g.id))[1] as "first!",
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
       0::double precision as "reward!"
from generation g
where g.policy = $1
  and (g.arm = 'shadow' and g.purpose = 'evaluation' and g.version = $2
       or g.arm = 'champion' and g.purpose = 'production' and g.version = $3)
  and abs(g.arm_probability - $4::double precision) < 1e-5
  and (g.finish_reason <> 'abort' or g.untrainable = 'engine_failed')
  and g.proven                  -- a replica sampled it, and nobody made it up
  and not g.decline_suppressed  -- an answer that was forced is not the policy's own
  -- users of the policy's tenant, and of tenants that consent
  and g.tenant_id in (select coalesce((select tenant_id from policy where name = $1), 'default')
                      union all
                      select tenant_id from tenant_consent where policy = $1 and withdrawn_at is null)
  and g.id >= first_generation_id($5)
  and g.sampled_at >= $5
  and g.sampled_at < $6
group by 1, 2, 3
