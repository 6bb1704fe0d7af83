-- Trajectories as they were logged, oldest first: those that faults.sql has passed. Parameters:
-- generation ids, seconds that a parent may arrive late.
select g.id, g.tenant_id, g.user_key, g.replica, g.engine,
       g.surface, g.group_id, g.purpose = 'production' as "production!",
       g.version_oldest, g.prompt_ids, g.token_ids, g.logprobs, g.train_mask, g.temperature,
       g.top_p, g.sampling as "sampling: Json<Sampling>",
       g.decline_suppressed, g.exploration_share, t.reward as "reward!", t.kept_characters,
       g.finish_reason = 'stop' as "stopped!",
       g.payload_digest is not null or g.prompt_prefix_len > 0 as "in_parts!",
       exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') as "routed!",
       g.signature, g.unsigned_digest, coalesce(g.finished_at, g.sampled_at) as "finished_at!",
       (select s.public_key from sampler s where s.id = g.sampler) as public_key,
       clock_timestamp() - t.closed_at < make_interval(secs => $2) as "young!"
from generation g
join trajectory t on t.generation_id = g.id
where g.id = any ($1)
  and t.generation_id = any ($1) -- or Postgres may read all of them
  and t.reward is not null
order by g.id
