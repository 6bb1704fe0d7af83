-- Takes up to $4 due judgements of judge $1 about the same text (tenant $2, digest $3) for $5
-- seconds, for process $6. For the one that has just learned the answer.
update judgement
set taken_until = now() + make_interval(secs => $5), next_at = now() + make_interval(secs => $5), taken_by = $6
where judge = $1 and tenant_id = $2
  and feedback_id = any (array(
      select feedback_id from judgement
      where judge = $1 and tenant_id = $2 and text_digest = $3 and next_at is not null and taken_until is null
        and next_at <= now() and answer_id is null
      limit $4
      for update skip locked))
returning feedback_id, tenant_id
