-- What users did with the answers of a canary and of the version it is compared with, in rows to be added up: one per side, period of
-- one share, and user, of what is summed up ($1: the canary), and of what was stored or closed since ($10; null: nothing is
-- summed up). $2 to $9: as in canary_answers.
--
-- Rewards are those of trajectories: a session counts once, by its last turn, however many it has. They count once nothing older of
-- their surface waits for its own reward. Else quick feedback and short sessions, which close first, would decide alone.
with recursive late as (
    select d.is_canary, d.period, d.person,
           (array_agg(d.id order by d.id))[1] as first,
           (array_agg(d.aborted order by d.id))[1] as first_aborted,
           count(*) as answers,
           count(*) filter (where d.declined) as declined,
           count(*) filter (where d.aborted) as aborted,
           count(*) filter (where d.slow) as slow,
           count(*) filter (where not d.declined and not d.aborted) as whole,
           coalesce(sum(d.tokens) filter (where not d.declined and not d.aborted), 0)::bigint as tokens
    from canary_answers($2, $3, $4, $5, $6, $7, $8, $9) d
    where d.stored_at >= coalesce($10::timestamptz, '-infinity')
    group by d.is_canary, d.period, d.person
),
waiting as (
    select w.surface, min(w.id::text)::uuid as id
    from canary_waiting($2, $3, $4, $5, $6, $7, $8, $9) w
    group by w.surface
),
-- Each is found in the index, so that trajectories that do not count yet are not read.
surfaces as (
    select (select min(c.surface) from canary_closed c where c.canary_id = $1 and $10::timestamptz is not null) as surface
    union all
    select (select min(c.surface) from canary_closed c where c.canary_id = $1 and c.surface > s.surface)
    from surfaces s
    where s.surface is not null
),
closed as (
    select c.*
    from surfaces s
    left join waiting w on w.surface = s.surface
    cross join lateral (
        select c.generation_id as id, c.surface, c.is_canary, c.period, c.person, c.tenant_id, c.reward, c.excluded, c.lowest, c.highest
        from canary_closed c
        where c.canary_id = $1 and c.surface = s.surface
          and c.generation_id <= coalesce(w.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    ) c
    union all
    select * from (
        select distinct on (coalesce(t.episode_id, t.generation_id))
               d.id, d.surface, d.is_canary, d.period, d.person, d.tenant_id, t.reward, t.excluded, t.lowest, t.highest
        from answer_reward t
        join canary_answers($2, $3, $4, $5, $6, $7, $8, $9) d on d.id = t.generation_id
        where t.closed_at >= coalesce($10::timestamptz, '-infinity')
          and t.generation_id >= first_generation_id($7)
          -- a turn that its session did not take is no trajectory
          and t.censor_code is distinct from 'late_turn'
        order by coalesce(t.episode_id, t.generation_id), d.id desc
    ) closed_late
)
select is_canary as "is_canary!", period as "period!", person as "user_key!", first, first_aborted as "first_aborted!",
       answers as "answers!", declined as "declined!", aborted as "aborted!", slow as "slow!", whole as "whole!", tokens as "tokens!",
       rewarded as "rewarded!", unscored as "unscored!", excluded as "excluded!", reward as "reward!",
       -- of the unscored
       lowest as "lowest!", highest as "highest!"
from canary_user
where canary_id = $1 and $10::timestamptz is not null
  and tenant_id in (select canary_tenants($2))
union all
select is_canary, period, person, first, first_aborted, answers, declined, aborted, slow, whole, tokens, 0, 0, 0, 0, 0, 0
from late
union all
select c.is_canary, c.period, c.person, null, false, 0, 0, 0, 0, 0, 0,
       count(c.reward), count(*) filter (where c.reward is null), count(*) filter (where c.excluded), coalesce(sum(c.reward), 0),
       coalesce(sum(c.lowest) filter (where c.reward is null), 0), coalesce(sum(c.highest) filter (where c.reward is null), 0)
from closed c
where c.tenant_id in (select canary_tenants($2))
  and not exists (select from waiting w where w.surface = c.surface and w.id < c.id)
group by c.is_canary, c.period, c.person
