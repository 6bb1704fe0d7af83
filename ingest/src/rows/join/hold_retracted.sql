-- Locks the open generations that feedback $1 is about, so that the closer skips them until the
-- commit. Turns are held by their episodes (hold_episodes.sql).
select from open_generation
where generation_id in (select f.generation_id from feedback f where f.id = any($1) and f.generation_id is not null)
and episode_id is null
order by generation_id for share
