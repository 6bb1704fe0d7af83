-- What the answers to these texts need: tenants $1, ids $2, of judge $3, whose version is $4. An
-- episode of more than $5 generations counts as one without consent: its trajectory has no reward.
--
-- `is_retracted`: within a horizon that no early close shortens, so that the text counts for nothing.
-- One that is retracted later counts, whether its judge was fast or slow.
select j.feedback_id as "feedback_id!", j.tenant_id as "tenant_id!", j.text_digest as "text_digest!",
       j.attempts as "attempts!", j.version, j.answer_id, j.value_bool, j.value_float,
       f.generation_id, f.episode_id, f.given_at as "given_at!", f.value_text as "text!",
       exists (select from retraction r where r.feedback_id = f.id and r.tenant_id = f.tenant_id
               and r.given_at <= target.retracted_until) as "is_retracted!",
       -- null: nothing that the text is about is stored yet
       target.consent as consent,
       cached.value_bool as "cached_bool?", cached.value_float as "cached_float?", cached.votes as "cached_votes?"
from unnest($1::text[], $2::uuid[]) as k (tenant_id, feedback_id)
join judgement j on j.feedback_id = k.feedback_id and j.tenant_id = k.tenant_id and j.judge = $3
join feedback f on f.id = j.feedback_id and f.tenant_id = j.tenant_id
cross join lateral (
    select bool_and(g.consent) and count(*) <= $5 as consent,
           min(case when d.definition ->> 'close_on_feedback' = 'true' or d.definition ->> 'close_on_episode_end' = 'true'
                    then '-infinity'
                    else greatest(g.sampled_at, g.finished_at)
                         + make_interval(secs => (d.definition ->> 'horizon_seconds')::double precision) end) as retracted_until
    from (
        select consent, surface, sampled_at, finished_at from generation where id = f.generation_id and tenant_id = f.tenant_id
        union all
        (select consent, surface, sampled_at, finished_at from generation
         where episode_id = f.episode_id and tenant_id = f.tenant_id
         limit $5::bigint + 1)
    ) g
    left join lateral (select definition from reward_definition where surface = g.surface order by version desc limit 1) d on true
) target
left join lateral (
    select value_bool, value_float, votes from judgement c
    where c.tenant_id = j.tenant_id and c.judge = $3 and c.text_digest = j.text_digest and c.version = $4
      and c.answer_id is not null and j.answer_id is null
    limit 1
) cached on true
