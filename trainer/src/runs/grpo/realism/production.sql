-- Users' traces that begin with one of these prompts and have closed: sessions, where a surface scores
-- sessions, else single answers. The newest of each prompt. Parameters: policy, hashes of prompts,
-- versions that answered them, maximum generations read of each version, maximum traces of each
-- prompt, maximum traces.
with read as (
    select g.id, g.tenant_id, g.episode_id, hash_array_extended(g.prompt_ids, 0) as prompt
    from unnest($3::bigint[]) as by (version)
    cross join lateral (
        select newest.id, newest.tenant_id, newest.episode_id, newest.prompt_ids
        from generation newest
        where newest.policy = $1
          and newest.version = by.version
          and newest.purpose = 'production'
          and newest.untrainable is distinct from 'no_first_token'
          and newest.prompt_prefix_len = 0
          and newest.payload_digest is null
          and newest.tenant_id = any ((select consenting_tenants($1))::text[])
        order by newest.id desc
        limit $4
    ) as g
),
closed as (
    select r.id, r.episode_id, t.episode_id is not null as is_episode,
           row_number() over (partition by r.prompt order by r.id desc) as nth
    from read r
    join trajectory t on t.generation_id = r.id
    where r.prompt = any ($2)
      and t.censor_code is distinct from 'late_turn'
      -- it is the first turn
      and (t.episode_id is null
           or not exists (select from generation before
                          where before.episode_id = r.episode_id and before.tenant_id = r.tenant_id and before.id < r.id))
)
select id as "id!", episode_id as "episode_id!", is_episode as "is_episode!"
from closed
where nth <= $5
order by nth, id desc
limit $6
