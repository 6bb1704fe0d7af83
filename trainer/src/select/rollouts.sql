-- Graded rollouts of a run, by id. Parameters: run, generation ids, seconds that a parent may
-- arrive late.
select g.id, g.surface, g.group_id, g.version_oldest, g.prompt_ids, g.token_ids, g.logprobs, g.train_mask, g.temperature,
       g.top_p, g.sampling as "sampling: Json<Sampling>",
       g.declined, g.decline_suppressed, g.exploration_share, t.reward as "reward!",
       g.payload_digest is not null or g.prompt_prefix_len > 0 as "in_parts!",
       exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') as "routed!",
       clock_timestamp() - t.closed_at < make_interval(secs => $3) as "young!"
from generation g
join trajectory t on t.generation_id = g.id
where g.run_id = $1
  and g.id = any($2)
  and t.reward is not null
  and not exists (select from disposition d where d.generation_id = g.id)
order by g.id
