-- Generations of a dataset as they were logged, with their rewards. Parameters: generation ids.
select g.id, g.tenant_id, g.policy, g.surface, g.arm, g.arm_probability, g.purpose, g.version, g.version_oldest,
       g.version_spans, g.line, g.replica, g.run_id, g.task_id, g.group_id, g.episode_id, g.segment, g.turn, g.parent_id,
       g.user_key, g.sampled_at, g.prompt_ids, g.token_ids, g.logprobs, g.train_mask, g.temperature, g.top_p, g.sampling,
       g.finish_reason, g.declined, g.decline_suppressed, g.exploration_share, g.shown, g.proven,
       g.payload_digest is not null or g.prompt_prefix_len > 0 as "in_parts!",
       t.reward as "reward!", t.turn_reward, t.episode_turns, t.signal, t.feedback_at, t.closed_at
from generation g
join trajectory t on t.generation_id = g.id
where g.id = any ($1)
  and t.generation_id = any ($1) -- or Postgres may read all of them
