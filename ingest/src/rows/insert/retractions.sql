-- `late`: the target of the feedback has closed. A retraction that arrives before its feedback is
-- not late at first, and becomes late if the feedback is.
insert into retraction (id, tenant_id, feedback_id, reason, given_at, late)
select
    r.id, r.tenant_id, r.feedback_id, r.reason, r.given_at,
    exists (
        select 1 from feedback f
        where f.id = r.feedback_id and f.tenant_id = r.tenant_id
          and (
              f.late
              or exists (select 1 from trajectory t where t.generation_id = f.generation_id)
              or f.episode_id is not null and episode_feedback_late(f.tenant_id, f.episode_id)
          )
    )
from unnest($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::timestamptz[]) as r (id, tenant_id, feedback_id, reason, given_at)
on conflict (id, tenant_id) do nothing
returning tenant_id, id, late
