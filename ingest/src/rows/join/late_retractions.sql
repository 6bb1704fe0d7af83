-- Marks retractions as late whose feedback is: all of feedback $1, which has just been stored, and
-- those with ids $2. Not all retractions of what is retracted once more: there may be any number.
update retraction r set late = true
from feedback f
where (r.feedback_id = any($1) or r.id = any($2)) and not r.late
  and f.id = r.feedback_id and f.tenant_id = r.tenant_id and f.late
