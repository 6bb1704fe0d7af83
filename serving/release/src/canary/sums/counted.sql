-- Adds closed trajectories that count now, because nothing older of their surface waits, but not more than 100,000. Returns how many.
-- $1: the canary; $2 to $9: as in canary_answers.
with recursive waiting as (
    select w.surface, min(w.id::text)::uuid as id
    from canary_waiting($2, $3, $4, $5, $6, $7, $8, $9) w
    group by w.surface
),
-- Each is found in the index, so that trajectories that do not count yet are not read.
surfaces as (
    select (select min(c.surface) from canary_closed c where c.canary_id = $1) as surface
    union all
    select (select min(c.surface) from canary_closed c where c.canary_id = $1 and c.surface > s.surface)
    from surfaces s
    where s.surface is not null
),
ready as (
    select c.surface, c.generation_id
    from surfaces s
    left join waiting w on w.surface = s.surface
    cross join lateral (
        select c.surface, c.generation_id
        from canary_closed c
        where c.canary_id = $1 and c.surface = s.surface
          and c.generation_id <= coalesce(w.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
        order by c.generation_id
        limit 100000
    ) c
    limit 100000
),
counted as (
    delete from canary_closed c
    using ready r
    where c.canary_id = $1 and c.surface = r.surface and c.generation_id = r.generation_id
    returning c.*
),
sums as (
    select c.is_canary, c.period, c.person, count(c.reward) as rewarded, count(*) filter (where c.reward is null) as unscored,
           count(*) filter (where c.excluded) as excluded, coalesce(sum(c.reward), 0) as reward,
           coalesce(sum(c.lowest) filter (where c.reward is null), 0) as lowest,
           coalesce(sum(c.highest) filter (where c.reward is null), 0) as highest
    from counted c
    group by c.is_canary, c.period, c.person
),
added as (
    update canary_user u
    set rewarded = u.rewarded + s.rewarded,
        unscored = u.unscored + s.unscored,
        excluded = u.excluded + s.excluded,
        reward = u.reward + s.reward,
        lowest = u.lowest + s.lowest,
        highest = u.highest + s.highest
    from sums s
    where u.canary_id = $1 and u.is_canary = s.is_canary and u.period = s.period and u.person = s.person
)
select count(*) as "counted!" from counted
