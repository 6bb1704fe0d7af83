-- What users did with the answers of a canary and of the version it is compared with: one row per side, period of one share,
-- and user. $4: the shares of the periods, of champion's users, who are $5 of all; $6, $7: from when until when; $8: seconds
-- after which an answer is slow, or null.
--
-- An answer belongs to the period whose probabilities it was drawn with, not to the time: replicas take a new assignment
-- seconds after it was written. So requests that name an alias, whose probability is 1, belong to none.
--
-- Rewards are those of trajectories: a session counts once, by its last turn, however many it has. They count once nothing older of
-- their surface waits for its own reward. Else quick feedback and short sessions, which close first, would decide alone.
with drawn as materialized (
    select g.id, g.arm = 'canary' as is_canary, period.number as period, g.person, g.surface, g.finish_reason = 'abort' as aborted,
           g.declined, g.finished_at - g.sampled_at > make_interval(secs => $8) as slow, g.version_spans
    from answer g
    join unnest($4::double precision[]) with ordinality as period (share, number)
         on abs(g.arm_probability - $5 * case when g.arm = 'canary' then period.share else 1 - period.share end) < 1e-5
    where g.policy = $1
      and (g.arm = 'canary' and g.version = $2 or g.arm = 'champion' and g.version = $3)
      and g.arm_probability < 1
      -- users of the policy's tenant, and of tenants that consent
      and g.tenant_id in (select coalesce((select tenant_id from policy where name = $1), 'default')
                          union all
                          select tenant_id from tenant_consent where policy = $1 and withdrawn_at is null)
      and g.id >= first_generation_id($6)
      and g.sampled_at >= $6
      and g.sampled_at < $7
),
-- the oldest that waits, a session by its last turn so far
waiting as materialized (
    select distinct on (last.surface) last.surface, last.id
    from (select distinct on (coalesce(o.episode_id, o.generation_id)) o.surface, o.generation_id as id
          from open_generation o
          join drawn d on d.id = o.generation_id
          where o.proven
          order by coalesce(o.episode_id, o.generation_id), o.generation_id desc) last
    order by last.surface, last.id
),
closed as (
    select distinct on (coalesce(t.episode_id, t.generation_id)) d.id, t.reward, t.excluded, t.lowest, t.highest
    from drawn d
    join answer_reward t on t.generation_id = d.id
    -- a turn that its session did not take is no trajectory
    where t.censor_code is distinct from 'late_turn'
      and not exists (select from waiting w where w.surface = d.surface and w.id < d.id)
    order by coalesce(t.episode_id, t.generation_id), d.id desc
)
select d.is_canary as "is_canary!",
       d.period as "period!",
       d.person as "user_key!",
       (array_agg(d.id order by d.id))[1] as "first!",
       (array_agg(d.aborted order by d.id))[1] as "first_aborted!",
       count(*) as "answers!",
       count(*) filter (where d.declined) as "declined!",
       count(*) filter (where d.aborted) as "aborted!",
       count(*) filter (where d.slow) as "slow!",
       count(*) filter (where not d.declined and not d.aborted) as "whole!",
       coalesce(sum(sampled_tokens(d.version_spans)) filter (where not d.declined and not d.aborted), 0)::bigint as "tokens!",
       count(c.reward) as "rewarded!",
       count(c.id) filter (where c.reward is null) as "unscored!",
       count(*) filter (where c.excluded) as "excluded!",
       coalesce(sum(c.reward), 0) as "reward!",
       -- of the unscored
       coalesce(sum(c.lowest) filter (where c.reward is null), 0) as "lowest!",
       coalesce(sum(c.highest) filter (where c.reward is null), 0) as "highest!"
from drawn d
left join closed c on c.id = d.id
group by 1, 2, 3
