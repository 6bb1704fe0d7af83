-- A page of closed trajectories of surface $1, oldest first: ids between $2 and $3, of tenant $4
-- (null: all), at most $5. Both tables have the bounds, so that Postgres uses their indexes and
-- skips partitions.
select t.generation_id, t.reward_definition, t.reward, t.censor_code, t.signal, t.feedback_at, t.closes_at, t.closed_at,
       t.episode_id as of_episode, t.turn_reward,
       g.tenant_id, g.episode_id as in_episode, g.purpose, g.declined, g.consent, g.shown,
       sampled_tokens(g.version_spans) as "tokens!",
       g.finish_reason, g.sampled_at, g.finished_at,
       e.ended_at as "ended_at?", e.stored_at as "end_stored_at?"
from trajectory t
join generation g on g.id = t.generation_id
left join episode_end e on e.tenant_id = g.tenant_id and e.episode_id = g.episode_id
where t.surface = $1
  and t.generation_id > $2 and t.generation_id < $3
  and g.id > $2 and g.id < $3
  and ($4::text is null or g.tenant_id = $4)
order by t.generation_id
limit $5
