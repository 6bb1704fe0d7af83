-- The oldest trajectories that may be trained on, by the time they were generated, and none beyond the oldest generation
-- that still waits for its horizon: choosing by the arrival of feedback would favour fast accepts. Runs right after
-- set_aside.sql in the same snapshot, so what that would refuse is not here. A cohort fills over several looks: who has
-- joined stays, and a row that appears later with a smaller id joins after it. Parameters: policy, learning alias, head,
-- rows at most, generations to pass over, seconds that a parent may be late.
select g.id, g.surface, g.group_id, g.version_oldest, g.prompt_ids, g.token_ids, g.logprobs, g.train_mask, g.temperature,
       g.top_p, g.sampling as "sampling: Json<Sampling>",
       g.declined, g.decline_suppressed, g.exploration_share, t.reward as "reward!",
       g.payload_digest is not null or g.prompt_prefix_len > 0 as "in_parts!",
       exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') as "routed!",
       clock_timestamp() - t.closed_at < make_interval(secs => $6) as "young!"
from generation g
join trajectory t on t.generation_id = g.id
where g.policy = $1
  and g.purpose = 'production'
  and g.arm = $2
  and g.version = $3
  and t.reward is not null
  and g.id <> all ($5)
  and not exists (select from disposition d where d.generation_id = g.id)
  and g.id < coalesce(
      (select o.generation_id
       from open_generation o
       join generation waiting on waiting.id = o.generation_id
       where waiting.policy = $1 and waiting.purpose = 'production' and waiting.arm = $2
       order by o.generation_id
       limit 1),
      'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by g.id
limit $4
