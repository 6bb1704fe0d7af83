-- Counts and deletes generations without a partition of their own, with ids above $1 and up to $2.
-- $3: the horizon.
with counted as (
    select g.tenant_id, g.policy, g.purpose, g.arm, (g.sampled_at at time zone 'utc')::date as day,
           disposition_of(d.kind, t.generation_id is not null, t.censor_code) as disposition,
           coalesce(d.code, t.censor_code, '') as code, count(*) as generations
    from generation_default g
    left join trajectory t on t.generation_id = g.id and t.generation_id > $1 and t.generation_id <= $2
    left join disposition d on d.generation_id = g.id and d.generation_id > $1 and d.generation_id <= $2
    where g.id > $1 and g.id <= $2
    group by g.tenant_id, g.policy, g.purpose, g.arm, day, disposition, coalesce(d.code, t.censor_code, '')
),
added as (
    insert into expired_generation (until_id, tenant_id, policy, purpose, arm, day, disposition, code, generations)
    select $3::uuid, tenant_id, policy, purpose, arm, day, disposition, code, generations from counted
    on conflict on constraint expired_generation_pkey
        do update set generations = expired_generation.generations + excluded.generations
),
gone as (
    delete from generation_default where id > $1 and id <= $2 returning 1
)
select count(*) as "rows!" from gone
