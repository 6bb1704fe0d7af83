-- When each of these feedback events, of tenants $1 and with ids $2, was first retracted. An answer
-- of a judge is retracted with its text.
select tenant_id as "tenant_id!", feedback_id as "feedback_id!", min(given_at) as "given_at!" from (
    select tenant_id, feedback_id, given_at from retraction where feedback_id = any($2)
    union all
    select r.tenant_id, j.answer_id, r.given_at from judgement j
    join retraction r on r.feedback_id = j.feedback_id and r.tenant_id = j.tenant_id
    where j.answer_id = any($2)
) r
where (tenant_id, feedback_id) in (select * from unnest($1::text[], $2::uuid[]))
group by tenant_id, feedback_id
