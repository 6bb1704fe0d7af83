-- Of about $3 episode ends that were stored after $1 and before $2, deletes those of episodes
-- without a stored generation. `next`: where to continue; null at the end.
with last as materialized (
    select stored_at from episode_end where stored_at > $1 and stored_at < $2
    order by stored_at offset $3::bigint - 1 limit 1
),
gone as (
    delete from episode_end e
    where e.stored_at > $1 and e.stored_at < $2
      and e.stored_at <= coalesce((select stored_at from last), 'infinity')
      -- `offset` keeps this one look-up per row, whatever the planner expects.
      and not exists (select from generation g where g.episode_id = e.episode_id and g.tenant_id = e.tenant_id offset 0)
    returning 1
)
select (select stored_at from last) as "next?", (select count(*) from gone) as "rows!"
