-- For each of these: tenants $1, targets $2 (episodes where $3), judges $4 that read the texts of
-- metrics $5, times $6. Whether answers to texts about the target, given until then and not
-- retracted, are missing: still open, or given up. Only rows with any. Of a target, the first $7
-- texts. With $8, what arrived after a closure does not count.
select a.nth as "nth!", bool_or(j.error is null) as "is_open!", bool_or(j.error is not null) as "has_failed!"
from unnest($1::text[], $2::uuid[], $3::bool[], $4::text[], $5::text[], $6::timestamptz[]) with ordinality
    as a (tenant_id, id, is_episode, judge, metric, until, nth)
cross join lateral (
    (select id, late from feedback
     where not a.is_episode and generation_id = a.id and tenant_id = a.tenant_id and metric_name = a.metric
       and given_at <= a.until
     order by given_at, id limit $7)
    union all
    (select id, late from feedback
     where a.is_episode and episode_id = a.id and tenant_id = a.tenant_id and metric_name = a.metric
       and given_at <= a.until
     order by given_at, id limit $7)
) f
join judgement j on j.feedback_id = f.id and j.tenant_id = a.tenant_id and j.judge = a.judge
where not ($8 and f.late)
  and not exists (select from feedback answer
                  where answer.id = j.answer_id and answer.tenant_id = a.tenant_id and not ($8 and answer.late))
  and not exists (select from retraction r
                  where r.feedback_id = f.id and r.tenant_id = a.tenant_id and r.given_at <= a.until)
group by a.nth
