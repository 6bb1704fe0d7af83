-- Deletes up to $3 feedback events about generations from $1 and below $2, with their retractions and
-- judgements. `next`: where to continue; null at the end. By physical row, because one generation may
-- have any number of feedback events.
with batch as materialized (
    select ctid, generation_id from feedback where generation_id >= $1 and generation_id < $2
    order by generation_id limit $3
),
gone as (
    delete from feedback where ctid = any (array(select ctid from batch)) returning id, tenant_id
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
select (select generation_id from batch order by generation_id offset $3::bigint - 1 limit 1) as "next?",
       (select count(*) from gone) as "rows!"
