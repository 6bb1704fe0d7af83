-- Each engine of a policy ($1) that was used in the last hours ($2): its last minute, and sums.
with recent as (
    select * from tide_minute where policy = $1 and minute > now() - make_interval(hours => $2)
), latest as (
    select distinct on (replica, engine) replica, engine, slots, slot_limit, whole, why, minute, expected, production_peak
    from recent order by replica, engine, minute desc, process desc
), felt as (
    select replica, engine,
           sum(production_slot_seconds) as production, sum(slots * seconds - production_slot_seconds) as idle,
           sum(lendable_slot_seconds) as lendable, sum(lent_slot_seconds) as lent,
           sum(taken_back)::bigint as taken_back, max(taking_back_ms_max) as taking_back,
           avg(abs(expected - production_peak)) as forecast_error,
           sum((alone ->> 'first_token_ms')::float8) / nullif(sum((alone ->> 'first_tokens')::float8), 0) as first_alone,
           sum((beside ->> 'first_token_ms')::float8) / nullif(sum((beside ->> 'first_tokens')::float8), 0) as first_beside,
           sum((alone ->> 'token_ms')::float8) / nullif(sum((alone ->> 'tokens')::float8), 0) as token_alone,
           sum((beside ->> 'token_ms')::float8) / nullif(sum((beside ->> 'tokens')::float8), 0) as token_beside
    from recent group by replica, engine
)
select l.replica, r.cluster as "cluster?", l.engine, l.slots, l.slot_limit, l.whole, l.why, l.minute as at, l.expected,
       l.production_peak as needed, f.forecast_error, f.production as "production_slot_seconds!",
       f.idle as "idle_slot_seconds!", f.lendable as "lendable_slot_seconds!", f.lent as "harvested_slot_seconds!",
       f.taken_back as "taken_back!", f.taking_back as "taking_back_ms_max!", f.first_alone as first_token_ms_alone,
       f.first_beside as first_token_ms_beside, f.token_alone as token_ms_alone, f.token_beside as token_ms_beside
from latest l
join felt f using (replica, engine)
left join replica r on r.id = l.replica and r.policy = $1
order by r.cluster, l.replica, l.engine
