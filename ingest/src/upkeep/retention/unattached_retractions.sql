-- Of about $3 retractions that were stored after $1 and before $2, deletes those without stored
-- feedback. `next`: where to continue; null at the end.
with last as materialized (
    select stored_at from retraction where stored_at > $1 and stored_at < $2
    order by stored_at offset $3::bigint - 1 limit 1
),
gone as (
    delete from retraction r
    where r.stored_at > $1 and r.stored_at < $2
      and r.stored_at <= coalesce((select stored_at from last), 'infinity')
      -- `offset` keeps this one look-up per row, whatever the planner expects.
      and not exists (select from feedback f where f.id = r.feedback_id and f.tenant_id = r.tenant_id offset 0)
    returning 1
)
select (select stored_at from last) as "next?", (select count(*) from gone) as "rows!"
