-- Stores when to close generations: once the horizon has passed both by their own times and since they
-- were stored. Of each: id $1, tenant $2, surface $3, start $4 and length $5 of its horizon in seconds,
-- proven $6, and of a turn its episode $7. A turn whose episode takes no more is a stray, which closes
-- alone and at once, and holds no cohort back. `now()` is also the `stored_at` of the generations.
-- Returns the turns that join their episodes.
with opened as (
    insert into open_generation (generation_id, surface, closes_at, proven, episode_id, stray)
    select g.id, g.surface,
           case when one.stray then now() else greatest(g.starts_at, now()) + make_interval(secs => g.horizon_seconds) end,
           g.proven and not one.stray, case when not one.stray then g.episode_id end, one.stray
    from unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[], $5::double precision[], $6::bool[], $7::uuid[])
         as g (id, tenant_id, surface, starts_at, horizon_seconds, proven, episode_id)
    cross join lateral (
        select exists (select from open_episode e
                       where e.episode_id = g.episode_id and e.tenant_id = g.tenant_id and e.is_full) as stray
        offset 0) as one
    returning generation_id, episode_id
)
select generation_id from opened where episode_id is not null
