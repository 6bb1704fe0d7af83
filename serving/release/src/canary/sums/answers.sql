-- Adds the answers that were stored in a time. $1: the canary; $2 to $9: as in canary_answers; $10, $11: stored from when until when.
insert into canary_user as sums (canary_id, is_canary, period, person, tenant_id, first, first_aborted, answers, declined, aborted, slow,
                                 whole, tokens)
select $1, d.is_canary, d.period, d.person, min(d.tenant_id),
       (array_agg(d.id order by d.id))[1],
       (array_agg(d.aborted order by d.id))[1],
       count(*),
       count(*) filter (where d.declined),
       count(*) filter (where d.aborted),
       count(*) filter (where d.slow),
       count(*) filter (where not d.declined and not d.aborted),
       coalesce(sum(d.tokens) filter (where not d.declined and not d.aborted), 0)
from canary_answers($2, $3, $4, $5, $6, $7, $8, $9) d
where d.stored_at >= $10 and d.stored_at < $11
group by d.is_canary, d.period, d.person
on conflict on constraint canary_user_pkey do update
set first = least(sums.first, excluded.first),
    first_aborted = case when excluded.first < sums.first then excluded.first_aborted else sums.first_aborted end,
    answers = sums.answers + excluded.answers,
    declined = sums.declined + excluded.declined,
    aborted = sums.aborted + excluded.aborted,
    slow = sums.slow + excluded.slow,
    whole = sums.whole + excluded.whole,
    tokens = sums.tokens + excluded.tokens
