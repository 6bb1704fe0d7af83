-- Graded rollouts of a run, by id. Parameters: run, generation ids, seconds that a parent may
-- arrive late.
select g.id, g.tenant_id, g.user_key, g.replica,
       g.surface, g.group_id, g.version_oldest, g.prompt_ids, g.token_ids, g.logprobs, g.train_mask, g.temperature,
       g.top_p, g.sampling as "sampling: Json<Sampling>",
       g.declined, g.decline_suppressed, g.exploration_share, t.reward as "reward!",
       reward_in_bounds(t.reward, w.definition) as "reward_in_bounds!",
       g.payload_digest is not null or g.prompt_prefix_len > 0 as "in_parts!",
       exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') as "routed!",
       g.signature, g.unsigned_digest, coalesce(g.finished_at, g.sampled_at) as "finished_at!",
       (select s.public_key from sampler s where s.id = g.sampler) as public_key,
       provenance_fault(g.sampler, g.replica, g.policy, g.arm, g.version, g.sampled_at, g.stored_at) as fault,
       clock_timestamp() - t.closed_at < make_interval(secs => $3) as "young!"
from generation g
join trajectory t on t.generation_id = g.id
left join reward_definition w on w.surface = t.surface and w.version = t.reward_definition
where g.run_id = $1
  and g.id = any($2)
  and t.reward is not null
  and not exists (select from disposition d where d.generation_id = g.id)
order by g.id
