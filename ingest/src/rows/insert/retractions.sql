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
              or exists (
                  select 1 from generation g join trajectory t on t.generation_id = g.id
                  where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id
              )
              and not exists (
                  select 1 from generation g join open_generation o on o.generation_id = g.id
                  where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id
                    and (o.episode_id is null or not episode_closed(f.tenant_id, f.episode_id))
              )
          )
    )
from unnest($1::uuid[], $2::text[], $3::uuid[], $4::text[], $5::timestamptz[]) as r (id, tenant_id, feedback_id, reason, given_at)
on conflict (id, tenant_id) do nothing
returning tenant_id, id, late
