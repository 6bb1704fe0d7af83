-- The newest generations with their rewards and dispositions, of at most $10 that are looked through.
-- $1 policy, $2 ids below this one, $3 hours back, $4 version, $5 arm, $6 tenant; then of what these leave: $7 and $8 the bounds
-- of the reward, $9 a code (of a drop or a censored one). Null: any.
with looked as (
    select id, tenant_id, version, arm, purpose, replica, sampled_at, finish_reason, declined
    from generation
    where policy = $1
      and id < $2
      and id >= first_generation_id(now() - make_interval(hours => $3))
      and ($4::bigint is null or version = $4)
      and ($5::text is null or arm = $5)
      and ($6::text is null or tenant_id = $6)
    order by id desc
    limit $10
),
matching as (
    select g.*, t.reward, t.signal, t.episode_id,
           disposition_of(d.kind, t.generation_id is not null, t.censor_code) as disposition,
           coalesce(d.code, t.censor_code) as code
    from looked g
    left join trajectory t on t.generation_id = g.id
    left join disposition d on d.generation_id = g.id
    where ($7::double precision is null or t.reward >= $7)
      and ($8::double precision is null or t.reward <= $8)
      and ($9::text is null or coalesce(d.code, t.censor_code) = $9)
    order by g.id desc
    limit 50
)
select id as "id!", version as "version!", arm as "arm!", purpose as "purpose!", replica as "replica!",
       sampled_at as "sampled_at!", finish_reason as "finish_reason!", declined as "declined!",
       reward, signal, episode_id, disposition as "disposition!", code,
       (select count(*) from looked) as "looked!",
       (select min(id::text)::uuid from looked) as oldest
from matching
order by id desc
