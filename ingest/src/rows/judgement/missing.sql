-- For each of these: tenants $1, targets $2 (episodes where $3), judges $4 that read the texts of
-- metrics $5, times $6. A text about the target that was given until then, was not retracted and
-- has no answer; whether its answer may still come. A text that was never queued is older than the
-- judge, and nobody will ask about it. Only rows with such a text. Looks at a target's first $9
-- texts, and not beyond the first without an answer.
--
-- Times $7: what arrived later does not count; null: all counts. What is marked late arrived at $8
-- at the earliest.
select a.nth as "nth!", m.is_open as "is_open!"
from unnest($1::text[], $2::uuid[], $3::bool[], $4::text[], $5::text[], $6::timestamptz[], $7::timestamptz[],
            $8::timestamptz[]) with ordinality
    as a (tenant_id, id, is_episode, judge, metric, until, arrived, late_at, nth)
cross join lateral (
    select j.feedback_id is not null and j.error is null as is_open
    from (
        (select id, late, stored_at from feedback
         where not a.is_episode and generation_id = a.id and tenant_id = a.tenant_id and metric_name = a.metric
           and given_at <= a.until
         order by given_at, id limit $9)
        union all
        (select id, late, stored_at from feedback
         where a.is_episode and episode_id = a.id and tenant_id = a.tenant_id and metric_name = a.metric
           and given_at <= a.until
         order by given_at, id limit $9)
    ) f
    left join judgement j on j.feedback_id = f.id and j.tenant_id = a.tenant_id and j.judge = a.judge
    where (a.arrived is null or case when f.late then greatest(f.stored_at, a.late_at) else f.stored_at end <= a.arrived)
      and not exists (
          select from feedback answer
          where answer.id = j.answer_id and answer.tenant_id = a.tenant_id
            and (a.arrived is null
                 or case when answer.late then greatest(answer.stored_at, a.late_at) else answer.stored_at end <= a.arrived))
      and not exists (
          select from retraction r
          where r.feedback_id = f.id and r.tenant_id = a.tenant_id and r.given_at <= a.until
            and (a.arrived is null or case when r.late then greatest(r.stored_at, a.late_at) else r.stored_at end <= a.arrived))
    limit 1
) m
