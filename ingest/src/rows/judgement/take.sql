-- Takes up to $2 due judgements of judge $1 for $3 seconds, and reads what their answers need. $4 is
-- the judge's version.
--
-- Tenants with due texts have equal chances, however many they have. A text that is being asked about is not taken a second time; when its answer is
-- there, `cached_…` has it.
with recursive tenant as (
    (select tenant_id from judgement where judge = $1 and next_at is not null order by tenant_id limit 1)
    union all
    select (select j.tenant_id from judgement j
            where j.judge = $1 and j.next_at is not null and j.tenant_id > t.tenant_id
            order by j.tenant_id limit 1)
    from tenant t where t.tenant_id is not null
),
due as (
    select j.*, row_number() over (partition by j.tenant_id order by j.next_at) as turn
    from tenant t
    cross join lateral (
        select feedback_id, tenant_id, text_digest, next_at, answer_id from judgement
        where judge = $1 and tenant_id = t.tenant_id and next_at <= now()
        order by next_at limit $2
    ) j
    where j.answer_id is not null
       or not exists (select from judgement o
                      where o.tenant_id = j.tenant_id and o.judge = $1 and o.text_digest = j.text_digest
                        and o.taken_until > now() and o.answer_id is null)
),
-- Of several with the same text, the first.
first as (
    select distinct on (tenant_id, text_digest, answer_id) * from due order by tenant_id, text_digest, answer_id, turn
),
chosen as (
    select feedback_id, tenant_id from first order by turn, random() limit $2
),
taken as (
    update judgement j
    set taken_until = now() + make_interval(secs => $3), next_at = now() + make_interval(secs => $3)
    from chosen c
    where j.judge = $1 and j.feedback_id = c.feedback_id and j.tenant_id = c.tenant_id
    returning j.*
)
select t.feedback_id as "feedback_id!", t.tenant_id as "tenant_id!", t.attempts as "attempts!",
       t.version, t.answer_id, t.value_bool, t.value_float,
       f.generation_id, f.episode_id, f.given_at as "given_at!", f.value_text as "text!",
       exists (select from retraction r where r.feedback_id = f.id and r.tenant_id = f.tenant_id) as "is_retracted!",
       -- null: nothing that the text is about is stored yet
       (select bool_and(g.consent) from (
            select consent from generation where id = f.generation_id and tenant_id = f.tenant_id
            union all
            select consent from generation where episode_id = f.episode_id and tenant_id = f.tenant_id
        ) g) as consent,
       cached.value_bool as "cached_bool?", cached.value_float as "cached_float?", cached.votes as "cached_votes?"
from taken t
join feedback f on f.id = t.feedback_id and f.tenant_id = t.tenant_id
left join lateral (
    select value_bool, value_float, votes from judgement c
    where c.tenant_id = t.tenant_id and c.judge = $1 and c.text_digest = t.text_digest and c.version = $4
      and t.answer_id is null
    limit 1
) cached on true
