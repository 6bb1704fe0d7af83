-- The digests under which the tables hold these events. $1 tenants, $2 sources, $3 ids. Each is looked up by itself: a join may
-- become a scan of everything while the table has grown faster than its statistics.
select e.tenant_id, e.source, e.event_id, e.digest
from unnest($1::text[], $2::text[], $3::text[]) as k (tenant_id, source, event_id)
cross join lateral (
    select tenant_id, source, event_id, digest from event_key
    where tenant_id = k.tenant_id and source = k.source and event_id = k.event_id
    limit 1
) e
