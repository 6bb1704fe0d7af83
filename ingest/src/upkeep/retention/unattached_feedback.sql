-- Of about $3 feedback events that were stored after $1 and before $2, deletes those without a
-- stored generation, with their retractions and judgements. `next`: where to continue; null at the
-- end.
with last as materialized (
    select stored_at from feedback where stored_at > $1 and stored_at < $2
    order by stored_at offset $3::bigint - 1 limit 1
),
gone as (
    delete from feedback f
    where f.stored_at > $1 and f.stored_at < $2
      and f.stored_at <= coalesce((select stored_at from last), 'infinity')
      -- `offset` keeps this one look-up per row, whatever the planner expects.
      and case
              when f.generation_id is not null then
                  not exists (select from generation g where g.id = f.generation_id and g.tenant_id = f.tenant_id offset 0)
              else
                  not exists (select from generation g where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id offset 0)
          end
    returning f.id, f.tenant_id
),
taken_back as (
    delete from retraction r
    where r.feedback_id = any (array(select id from gone))
      and exists (select from gone where gone.id = r.feedback_id and gone.tenant_id = r.tenant_id)
),
judged as (
    delete from judgement j
    where j.feedback_id = any (array(select id from gone))
      and exists (select from gone where gone.id = j.feedback_id and gone.tenant_id = j.tenant_id)
)
select (select stored_at from last) as "next?", (select count(*) from gone) as "rows!"
