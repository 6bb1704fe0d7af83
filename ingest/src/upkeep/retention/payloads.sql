-- Deletes about $3 references to payloads of generations above $1 and below $2. Payloads that
-- nothing else refers to are put on the list of objects to delete. `next`: where to continue;
-- null at the end.
with last as materialized (
    select generation_id from payload_reference where generation_id > $1 and generation_id < $2
    order by generation_id offset $3::bigint - 1 limit 1
),
gone as (
    delete from payload_reference
    where generation_id > $1 and generation_id < $2
      and generation_id <= coalesce((select generation_id from last), 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    returning tenant_id, digest
),
unreferenced as (
    insert into payload_unreferenced (tenant_id, digest)
    select distinct tenant_id, digest from gone r
    -- `offset` keeps this one look-up per row, whatever the planner expects.
    where not exists (select from payload_reference p
                      where p.digest = r.digest and p.tenant_id = r.tenant_id and p.generation_id >= $2 offset 0)
    on conflict do nothing
)
select (select generation_id from last) as "next?", (select count(*) from gone) as "rows!"
