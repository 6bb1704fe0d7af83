-- The digests under which the tables hold these events. $1 tenant, $2 sources, $3 ids. Each is looked up by itself: a join may
-- become a scan of everything while the table has grown faster than its statistics.
select e.source, e.event_id, e.digest
from unnest($2::text[], $3::text[]) as k (source, event_id)
cross join lateral (
    select source, event_id, digest from event_key
    where tenant_id = $1 and source = k.source and event_id = k.event_id
    limit 1
) e
