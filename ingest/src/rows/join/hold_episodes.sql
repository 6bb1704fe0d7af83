-- Locks open episodes until the commit: those of turns and ends that are being stored (tenants $1, ids
-- $2), and those that feedback is about ($3, $4) or whose feedback is retracted ($5, $6), if they are
-- due at $7 or their surface is one of $8, so that they may close before. None that is full, whose
-- feedback does not count. Not `for share`, because the same transaction may update the row.
select from open_episode e
where (e.tenant_id, e.episode_id) in (
    select * from unnest($1::text[], $2::uuid[])
    union
    select * from unnest($3::text[], $4::uuid[])
    union
    select f.tenant_id, coalesce(f.episode_id, o.episode_id)
    from unnest($5::text[], $6::uuid[]) as retracted (tenant_id, id)
    join feedback f on f.id = retracted.id and f.tenant_id = retracted.tenant_id
    left join open_generation o on o.generation_id = f.generation_id
    where coalesce(f.episode_id, o.episode_id) is not null
)
and not e.is_full
and ((e.tenant_id, e.episode_id) in (select * from unnest($1::text[], $2::uuid[])) or e.closes_at <= $7 or e.surface = any($8))
order by e.episode_id, e.tenant_id
for no key update
