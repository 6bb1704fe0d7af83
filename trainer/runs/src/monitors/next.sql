-- The figures of the next closed trajectories of the learning arm and of the arms that it is compared
-- with, on one surface, in the order of their last generations: one row of means over its answers for
-- each trajectory. Answers that exploration forced and those whose caller left do not count, because
-- neither is the policy's choice; a trajectory of nothing else has nulls.
--
-- It stops before the oldest trajectory that is still open, a session by its last turn so far, so that
-- neither fast feedback nor short sessions come first. Answers that were stored later than $6 seconds
-- after their first token may be missed.
--
-- Parameters: policy, learning alias, the other arms, surface, last generation that was taken, seconds, maximum rows.
with boundary as materialized (
    select least(
        first_generation_id(clock_timestamp() - make_interval(secs => $6)),
        (select o.generation_id
         from open_generation o
         where o.surface = $4 and o.proven
           -- no join, so that Postgres asks for the oldest ones only, one by one
           and (select waiting.policy = $1 and waiting.purpose = 'production' and waiting.arm = any ($2::text || $3::text[])
                       and waiting.tenant_id = any ((select consenting_tenants($1))::text[])
                       and not exists (select from open_generation later
                                       join generation turn on turn.id = later.generation_id
                                       where later.episode_id = o.episode_id and later.generation_id > o.generation_id
                                         and turn.id > o.generation_id and turn.tenant_id = waiting.tenant_id
                                         and later.proven)
                from generation waiting where waiting.id = o.generation_id)
         order by o.generation_id
         limit 1)) as id
),
chosen as materialized (
    select last.*
    from unnest($2::text || $3::text[]) as arms (name)
    cross join lateral ( -- each arm's rows by the index, in order
        select g.id, g.arm, g.version, g.tenant_id, t.episode_id
        from generation g
        cross join lateral (select t.episode_id from trajectory t where t.generation_id = g.id offset 0) as t
        where g.policy = $1 and g.arm = arms.name and g.surface = $4 and g.proven and g.purpose = 'production'
          and g.id > $5 and g.id < (select b.id from boundary b)
          and g.tenant_id = any ((select consenting_tenants($1))::text[])
          and (t.episode_id is null or not exists (
              select from trajectory later
              join generation turn on turn.id = later.generation_id
              where later.episode_id = t.episode_id and later.generation_id > g.id and turn.id > g.id
                and turn.tenant_id = g.tenant_id))
        order by g.id
        limit $7
    ) as last
    order by last.id
    limit $7
),
answer as materialized (
    select c.id as last_id, g.id
    from chosen c
    cross join lateral (
        select c.id where c.episode_id is null
        union all
        -- of a long session its last turns
        (select t.generation_id from trajectory t
         join generation turn on turn.id = t.generation_id and turn.tenant_id = c.tenant_id
         where t.episode_id = c.episode_id order by t.generation_id desc limit 256)
    ) as turn (id)
    cross join lateral ( -- one by one, or Postgres may read all generations
        select generation.id
        from generation
        where generation.id = turn.id and generation.tenant_id = c.tenant_id and generation.arm = c.arm
          and not generation.decline_suppressed and generation.finish_reason <> 'abort'
        offset 0
    ) as g
)
select c.id as "id!", c.version as "version!", c.arm = $2 as "watched!",
       avg(f.shown::int)::float8 as shown, avg(f.accepted::int)::float8 as accepted, avg(f.edited::int)::float8 as edited,
       avg(f.unanswered::int)::float8 as unanswered, avg(f.unscored::int)::float8 as unscored,
       avg(f.disagreement::int)::float8 as disagreement, avg(f.tool_failed::int)::float8 as tool_failed,
       avg(f.length)::float8 as length, avg(f.repetition)::float8 as repetition, avg(f.entropy)::float8 as entropy
from chosen c
left join answer on answer.last_id = c.id
left join answer_figures(array(select id from answer)) f on f.id = answer.id
group by c.id, c.version, c.arm
order by c.id
