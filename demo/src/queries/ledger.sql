-- The policy's generations since the start of the run, counted by disposition.
-- $1 policy, $2 start of the run, $3 generations that the demo got as answers
select
    count(*) as "generations!",
    count(*) filter (where disposition = 'open') as "open!",
    count(*) filter (where disposition = 'queued') as "queued!",
    count(*) filter (where disposition = 'trained') as "trained!",
    count(*) filter (where disposition = 'censored') as "censored!",
    count(*) filter (where disposition = 'dropped') as "dropped!",
    count(*) filter (where disposition = 'held_out') as "held_out!",
    count(*) filter (where disposition = 'erased') as "erased!",
    -- Answered, so acknowledged by the log, but not stored. Must be 0 once the sink has caught up.
    (select count(*)
     from unnest($3::uuid[]) as answered (id)
     where not exists (select from generation g where g.id = answered.id)) as "missing!",
    -- Trained by a step whose parent is not the version that sampled it. 0 if staleness is 0.
    count(*) filter (
        where disposition = 'trained'
          and version <> (select s.parent from step s where s.run_id = ledger.run_id and s.step = ledger.step)
    ) as "trained_stale!"
from ledger
where policy = $1 and sampled_at >= $2 and generation_id >= first_generation_id($2)
