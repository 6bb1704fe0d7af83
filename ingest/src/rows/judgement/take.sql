-- Takes up to $2 due judgements of judge $1 for $3 seconds, for process $4.
--
-- Tenants with due texts have equal chances, however many they have. Of a tenant, the newest come
-- first: after an outage, trajectories still wait for their answers. A text is taken once, and not
-- while it is being asked about; whoever gets its answer goes on with its copies. Looks at the
-- newest 100 + $2 of a tenant.
with recursive tenant as (
    (select tenant_id from judgement where judge = $1 and next_at is not null order by tenant_id limit 1)
    union all
    select (select j.tenant_id from judgement j
            where j.judge = $1 and j.next_at is not null and j.tenant_id > t.tenant_id
            order by j.tenant_id limit 1)
    from tenant t where t.tenant_id is not null
),
due as (
    select d.*, row_number() over (partition by d.tenant_id order by d.next_at desc) as turn
    from tenant t
    cross join lateral (
        select one.feedback_id, one.tenant_id, one.next_at
        from (
            select distinct on (text_digest, answer_id) * from (
                select feedback_id, tenant_id, text_digest, next_at, answer_id from judgement
                where judge = $1 and tenant_id = t.tenant_id and next_at <= now()
                order by next_at desc limit 100 + $2::bigint
            ) newest
            order by text_digest, answer_id, next_at desc
        ) one
        where one.answer_id is not null
           or not exists (select from judgement o
                          where o.judge = $1 and o.tenant_id = t.tenant_id and o.text_digest = one.text_digest
                            and o.next_at is not null and o.taken_until > now() and o.answer_id is null)
        order by one.next_at desc limit $2
    ) d
),
chosen as (
    select feedback_id, tenant_id from due order by turn, random() limit $2
)
update judgement j
set taken_until = now() + make_interval(secs => $3), next_at = now() + make_interval(secs => $3), taken_by = $4
from chosen c
where j.judge = $1 and j.feedback_id = c.feedback_id and j.tenant_id = c.tenant_id and j.next_at <= now()
returning j.feedback_id, j.tenant_id
