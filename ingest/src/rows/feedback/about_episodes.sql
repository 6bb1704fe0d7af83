-- The feedback about episodes that scoring reads, in their order: tenants $1, ids $2, surfaces $3, times
-- $4 at which they were stored. One of surface $5 needs the first $7 events of metric $6, by event
-- time; their texts only if $8. At most $9 rows.
select a.id as "about!", a.tenant_id as "tenant_id!", f.id as "id!", f.metric_name as "metric_name!",
       f.value_bool, f.value_float, f.value_text, f.given_at as "given_at!", f.stored_at as "stored_at!", f.late as "late!",
       extract(epoch from f.stored_at - a.stored_at)::double precision as "after_seconds!"
from unnest($1::text[], $2::uuid[], $3::text[], $4::timestamptz[]) with ordinality
    as a (tenant_id, id, surface, stored_at, nth)
join unnest($5::text[], $6::text[], $7::bigint[], $8::bool[]) as needed (surface, metric, signals_max, texts)
    on needed.surface = a.surface
cross join lateral (
    select id, metric_name, value_bool, value_float, case when needed.texts then value_text end as value_text,
           given_at, stored_at, late
    from feedback
    where episode_id = a.id and tenant_id = a.tenant_id and metric_name = needed.metric
    order by given_at, id limit needed.signals_max
) f
order by a.nth
limit $9
