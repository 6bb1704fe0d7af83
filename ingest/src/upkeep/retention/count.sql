-- Adds the generations of partition $3 with ids above $1 and up to $2 to the counts of the week
-- that is about to be deleted.
with counted as (
    select g.tenant_id, g.policy, g.purpose, g.arm, (g.sampled_at at time zone 'utc')::date as day,
           disposition_of(d.kind, t.generation_id is not null, t.censor_code) as disposition,
           coalesce(d.code, t.censor_code, '') as code, count(*) as generations
    from generation g
    left join trajectory t on t.generation_id = g.id and t.generation_id > $1 and t.generation_id <= $2
    left join disposition d on d.generation_id = g.id and d.generation_id > $1 and d.generation_id <= $2
    where g.id > $1 and g.id <= $2 and g.tableoid = to_regclass($3::text)
    group by g.tenant_id, g.policy, g.purpose, g.arm, day, disposition, coalesce(d.code, t.censor_code, '')
),
moved as (
    update generation_expiry set counted_id = $2
)
insert into expiring_generation (tenant_id, policy, purpose, arm, day, disposition, code, generations)
select tenant_id, policy, purpose, arm, day, disposition, code, generations from counted
on conflict on constraint expiring_generation_pkey
    do update set generations = expiring_generation.generations + excluded.generations
