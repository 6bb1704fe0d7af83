-- Opens the episodes of turns that are being stored, or moves when to look at them. Of each turn:
-- tenant $1, episode $2, surface $3, start $4 and length $5 of its horizon in seconds; $6 how many
-- seconds after its first turn an episode takes more. With more than $7 open turns, the closer looks
-- at once; with more than $8, no more turns join. `now()` is also the `stored_at` of the turns.
insert into open_episode (tenant_id, episode_id, surface, turn_stored_at, turns, is_full, closes_at)
select distinct on (t.episode_id, t.tenant_id)
       t.tenant_id, t.episode_id, t.surface, now(), count(*) over episode, count(*) over episode > $8,
       case when count(*) over episode > $7 then now()
            else max(greatest(t.starts_at, now()) + make_interval(secs => t.horizon_seconds)) over episode end
from unnest($1::text[], $2::uuid[], $3::text[], $4::timestamptz[], $5::double precision[])
     as t (tenant_id, episode_id, surface, starts_at, horizon_seconds)
window episode as (partition by t.episode_id, t.tenant_id)
order by t.episode_id, t.tenant_id, t.starts_at, t.surface
on conflict (episode_id, tenant_id) do update
    set turn_stored_at = greatest(open_episode.turn_stored_at, excluded.turn_stored_at),
        turns = open_episode.turns + excluded.turns,
        is_full = open_episode.is_full or open_episode.turns + excluded.turns > $8,
        closes_at = case
            when open_episode.is_full or open_episode.turns + excluded.turns > $7 then now()
            else greatest(open_episode.closes_at,
                          least(excluded.closes_at,
                                open_episode.opened_at + make_interval(secs => $6) + (excluded.closes_at - now()))) end
