-- Deletes up to $3 trajectories with ids above $1 and below $2, where no partition could be
-- dropped. `next`: where to continue; null at the end.
with last as materialized (
    select generation_id from trajectory where generation_id > $1 and generation_id < $2
    order by generation_id offset $3::bigint - 1 limit 1
),
gone as (
    delete from trajectory
    where generation_id > $1 and generation_id < $2
      and generation_id <= coalesce((select generation_id from last), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    returning 1
)
select (select generation_id from last) as "next?", (select count(*) from gone) as "rows!"
