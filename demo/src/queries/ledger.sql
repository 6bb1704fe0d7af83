-- Every generation of the policy since the run began, by what became of it.
-- $1 policy, $2 when the run began, $3 the generations that the demo was answered with
select
    count(*) as "generations!",
    count(*) filter (where disposition = 'open') as "open!",
    count(*) filter (where disposition = 'queued') as "queued!",
    count(*) filter (where disposition = 'trained') as "trained!",
    count(*) filter (where disposition = 'censored') as "censored!",
    count(*) filter (where disposition = 'dropped') as "dropped!",
    count(*) filter (where disposition = 'held_out') as "held_out!",
    count(*) filter (where disposition = 'erased') as "erased!",
    -- Answered, so acknowledged by the log, and yet not here: must be 0 once the sink has caught up.
    (select count(*)
     from unnest($3::uuid[]) as answered (id)
     where not exists (select from generation g where g.id = answered.id)) as "missing!",
    -- Trained by a step that started from another version than the one that sampled it: staleness 0 means none.
    count(*) filter (
        where disposition = 'trained'
          and version <> (select s.parent from step s where s.run_id = ledger.run_id and s.step = ledger.step)
    ) as "trained_stale!"
from ledger
where policy = $1 and sampled_at >= $2 and generation_id >= first_generation_id($2)
