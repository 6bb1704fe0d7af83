-- What still has to happen to the generations of this run before its figures are final.
-- $1 policy, $2 when the run began
select
    count(*) filter (where disposition = 'open') as "open!",
    -- Fewer than a cohort of these can stay: a step takes a whole one.
    count(*) filter (where disposition = 'queued' and arm = 'champion') as "queued!"
from ledger
where policy = $1 and sampled_at >= $2 and generation_id >= first_generation_id($2)
