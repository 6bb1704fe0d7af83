-- Counts an attempt that failed for text $4 (tenant $2, digest $3) of judge $1, which process $9
-- works on, and for its queued copies: code $5, reason $6. With $7 failures a text is given up; the
-- others are due after $8 seconds. `given_up`: how many were.
with failed as (
    update judgement
    set attempts = attempts + 1, taken_until = null, taken_by = null, reason = $6,
        next_at = case when attempts + 1 < $7 then now() + make_interval(secs => $8) end,
        error = case when attempts + 1 >= $7 then $5 end
    where judge = $1 and tenant_id = $2 and text_digest = $3 and next_at is not null and answer_id is null
      and (taken_until is null or feedback_id = $4 and taken_by = $9)
    returning error
)
select count(error) as "given_up!" from failed
