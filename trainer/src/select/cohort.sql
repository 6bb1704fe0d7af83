-- The oldest trajectories that may be trained on, ordered by generation. Stops before the oldest
-- generation whose horizon is still open, because choosing by the arrival of feedback would favour
-- fast accepts. Runs right after set_aside.sql in the same snapshot, so rows that it refuses are
-- not here. A cohort fills over several calls: its members stay, and a row that appears later is
-- added after them, even if its id is smaller. Parameters: policy, learning alias, head, maximum
-- rows, generations to skip, seconds that a parent may arrive late.
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
