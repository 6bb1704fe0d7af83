-- All feedback about these generations, directly or through their episode. `after_seconds` is how
-- long after its generation each was stored; it is negative if feedback was stored first.
select g.id as "generation_id!", f.id as "id!", f.metric_name as "metric_name!",
       f.value_bool, f.value_float, f.value_text, f.given_at as "given_at!", f.stored_at as "stored_at!", f.late as "late!",
       extract(epoch from f.stored_at - g.stored_at)::double precision as "after_seconds!"
from generation g
cross join lateral (
    select id, metric_name, value_bool, value_float, value_text, given_at, stored_at, late
    from feedback where generation_id = g.id and tenant_id = g.tenant_id
    union all
    select id, metric_name, value_bool, value_float, value_text, given_at, stored_at, late
    from feedback where episode_id = g.episode_id and tenant_id = g.tenant_id
) f
where g.id = any($1)
