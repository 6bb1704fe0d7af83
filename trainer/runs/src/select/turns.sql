-- All turns of some episodes, in the order of the session: those that closed together, with a reward.
-- Turns that came later are trajectories without one. Parameters: a turn of each episode, policy,
-- arms that are learned from.
select chosen.nth as "nth!", turn.*
from unnest($1::uuid[]) with ordinality as chosen (id, nth)
cross join lateral (
    select g.id as "id!", t.episode_id as "episode_id!", t.episode_turns as "episode_turns!", t.turn_reward,
           t.reward as "reward!",
           -- it is of this run, which has not decided about it
           (g.policy = $2 and g.arm = any ($3) and g.purpose = 'production'
            and not exists (select from disposition d where d.generation_id = g.id)) as "is_queued!",
           -- with its context
           g.prompt_prefix_len + cardinality(g.prompt_ids) + cardinality(g.token_ids)
               + coalesce((select r.size_bytes / 4 from payload_reference r
                           where g.payload_digest is not null and r.generation_id = g.id and r.kind = 'prompt'), 0)
               as "tokens!"
    from (select g.tenant_id, t.episode_id
          from generation g
          join trajectory t on t.generation_id = g.id
          where g.id = chosen.id and t.generation_id = chosen.id
          offset 0) as one
    join trajectory t on t.episode_id = one.episode_id and t.reward is not null
    join generation g on g.id = t.generation_id and g.tenant_id = one.tenant_id
    order by g.segment, g.turn, g.id
    offset 0
) as turn
order by chosen.nth
