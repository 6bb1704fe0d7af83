-- The digests under which the tables hold these events. $1 tenant, $2 sources, $3 ids.
select source, event_id, digest
from event_key
where tenant_id = $1 and (source, event_id) in (select * from unnest($2::text[], $3::text[]))
