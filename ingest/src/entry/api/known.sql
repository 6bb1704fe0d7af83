-- The digests of those of these events that the tables hold. $1 tenants, $2 sources, $3 ids,
-- $4 kinds. Looks up each event by itself: while the table grows faster than its statistics, a join
-- could become a full scan.
select e.tenant_id, e.source, e.event_id, e.kind, e.digest
from unnest($1::text[], $2::text[], $3::text[], $4::text[]) as k (tenant_id, source, event_id, kind)
cross join lateral (
    select tenant_id, source, event_id, kind, digest from event_key
    where tenant_id = k.tenant_id and source = k.source and event_id = k.event_id and kind = k.kind
    limit 1
) e
