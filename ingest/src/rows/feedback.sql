-- The feedback that scoring reads, in the order of generations $1: about them, directly or
-- through their episode. A generation of surface $2 needs the first $4 events of metric $3, by
-- event time, about each of the two; their texts only if $5. At most $6 rows. `after_seconds` is
-- how long after its generation each was stored; it is negative if feedback was stored first.
select g.id as "generation_id!", g.tenant_id as "tenant_id!", f.id as "id!", f.metric_name as "metric_name!",
       f.value_bool, f.value_float, f.value_text, f.given_at as "given_at!", f.stored_at as "stored_at!", f.late as "late!",
       extract(epoch from f.stored_at - g.stored_at)::double precision as "after_seconds!"
from unnest($1::uuid[]) with ordinality as due (id, nth)
join generation g on g.id = due.id
join unnest($2::text[], $3::text[], $4::bigint[], $5::bool[]) as needed (surface, metric, signals_max, texts)
    on needed.surface = g.surface
cross join lateral (
    (select id, metric_name, value_bool, value_float, case when needed.texts then value_text end as value_text,
            given_at, stored_at, late
     from feedback
     where generation_id = g.id and tenant_id = g.tenant_id and metric_name = needed.metric
     order by given_at, id limit needed.signals_max)
    union all
    (select id, metric_name, value_bool, value_float, case when needed.texts then value_text end as value_text,
            given_at, stored_at, late
     from feedback
     where episode_id = g.episode_id and tenant_id = g.tenant_id and metric_name = needed.metric
     order by given_at, id limit needed.signals_max)
) f
order by due.nth
limit $6
