-- Locks open episodes until the commit: those of turns and ends that are being stored ($1), and those
-- that feedback is about ($2) or whose feedback is retracted ($3), if they are due at $4 or their
-- surface is one of $5, so that they may close before. None that is full, whose feedback does not
-- count. Not `for share`, because the same transaction may update the row.
select from open_episode e
where e.episode_id in (
    select unnest($1::uuid[])
    union
    select unnest($2::uuid[])
    union
    select coalesce(f.episode_id, o.episode_id) from feedback f
    left join open_generation o on o.generation_id = f.generation_id
    where f.id = any($3) and coalesce(f.episode_id, o.episode_id) is not null
)
and not e.is_full
and (e.episode_id = any($1) or e.closes_at <= $4 or e.surface = any($5))
order by e.episode_id, e.tenant_id
for no key update
