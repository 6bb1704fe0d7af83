-- What the tables have of the run's sessions: episodes by what became of their turns.
-- $1 policy, $2 start of the run, $3 surface
with session as (
    select
        g.episode_id,
        g.arm,
        count(*) as turns,
        count(t.episode_id) as closed,
        min(t.episode_turns) as closed_turns,
        bool_or(t.censor_code is not null) as censored,
        count(*) filter (where d.kind = 'trained') as trained,
        count(*) filter (where d.kind = 'dropped' and d.code = 'stale') as stale,
        count(distinct (d.run_id, d.step)) filter (where d.kind = 'trained') as steps
    from generation g
    left join trajectory t on t.generation_id = g.id
    left join disposition d on d.generation_id = g.id
    where g.policy = $1 and g.sampled_at >= $2 and g.id >= first_generation_id($2) and g.surface = $3
    group by g.episode_id, g.arm
)
select
    count(*) as "episodes!",
    coalesce(sum(turns), 0)::bigint as "turns!",
    -- All turns have a row, and each says of how many turns the trajectory is.
    count(*) filter (where closed = turns and closed_turns = turns) as "closed!",
    count(*) filter (where censored) as "censored!",
    count(*) filter (where arm = 'learner') as "learner!",
    count(*) filter (where trained > 0) as "trained!",
    count(*) filter (where trained = turns) as "trained_whole!",
    -- In more than one step. Must be 0.
    count(*) filter (where steps > 1) as "divided!",
    coalesce(sum(trained), 0)::bigint as "turns_trained!",
    coalesce(sum(stale), 0)::bigint as "turns_stale!"
from session
