-- Deletes about $3 identities of events that were received after $1 and before $2. `next`: where to
-- continue; null at the end.
with last as materialized (
    select received_at from event_key where received_at > $1 and received_at < $2
    order by received_at offset $3::bigint - 1 limit 1
),
gone as (
    delete from event_key
    where received_at > $1 and received_at < $2
      and received_at <= coalesce((select received_at from last), 'infinity')
    returning 1
)
select (select received_at from last) as "next?", (select count(*) from gone) as "rows!"
