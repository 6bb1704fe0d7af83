-- The demo's own rewards beside the trajectory table's, per arm.
-- $1 generation ids, $2 the arm that answered each, $3 the reward that each should carry (null: censored)
select
    demo.arm as "arm!",
    count(t.reward) as "rewarded!",
    avg(t.reward) as reward_mean,
    count(*) filter (where t.generation_id is null) as "not_closed!",
    count(*) filter (where abs(t.reward - demo.reward) > 1e-6) as "differ!",
    -- Answered, but not by the horizon or not acknowledged.
    count(*) filter (where t.censor_code is not null and demo.reward is not null) as "censored_though_answered!",
    count(*) filter (where t.reward is not null and demo.reward is null) as "rewarded_though_silent!"
from unnest($1::uuid[], $2::text[], $3::float8[]) as demo (id, arm, reward)
left join trajectory t on t.generation_id = demo.id
group by demo.arm
order by demo.arm
