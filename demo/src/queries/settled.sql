-- Generations of this run whose disposition may still change. At 0 its figures are final.
-- $1 policy, $2 start of the run
select
    count(*) filter (where disposition = 'open') as "open!",
    -- May end above 0: a step needs a full cohort, so fewer can remain queued.
    count(*) filter (where disposition = 'queued' and arm = 'learner') as "queued!"
from ledger
where policy = $1 and sampled_at >= $2 and generation_id >= first_generation_id($2)
