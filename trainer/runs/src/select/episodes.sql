-- All turns of a run's episodes that have closed with a reward, in the order of each session.
-- Parameters: run, episodes, an id from before their turns.
select g.id as "id!", t.episode_id as "episode_id!", t.episode_turns as "episode_turns!", t.turn_reward,
       cardinality(g.token_ids) as "tokens!", g.finish_reason = 'length' as "is_cut_off!",
       not exists (select from disposition d where d.generation_id = g.id) as "is_undecided!"
from generation g
join trajectory t on t.generation_id = g.id
where g.run_id = $1
  and g.episode_id = any ($2)
  and t.episode_id = g.episode_id
  and t.reward is not null
  -- only the weeks since then
  and g.id >= $3
  and t.generation_id >= $3
order by t.episode_id, g.segment, g.turn, g.id
