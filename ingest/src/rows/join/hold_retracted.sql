-- Locks the open generations that feedback is about (tenants $1, ids $2), so that the closer skips
-- them until the commit. Turns are held by their episodes (hold_episodes.sql).
select from open_generation
where generation_id in (
    select f.generation_id from unnest($1::text[], $2::uuid[]) as retracted (tenant_id, id)
    join feedback f on f.id = retracted.id and f.tenant_id = retracted.tenant_id
    where f.generation_id is not null
)
and episode_id is null
order by generation_id for share
