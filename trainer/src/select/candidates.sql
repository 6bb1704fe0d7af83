-- The oldest queued trajectories of the head, by generation: the next to be checked and to join the
-- cohort. Two things end a surface's cohort, so that neither fast feedback nor short answers are
-- favored:
-- - its oldest generation of the head whose horizon is still open;
-- - the time until which all its answers have arrived: what the tables hold, less the time that
--   nearly all of its answers take. An id is the time of an answer's first token, and its row
--   appears after the last, so a younger trajectory may have overtaken an answer that is still
--   being sampled. On a surface without an answer in the last hour, that time is not known yet and 0.
--
-- Nothing here says that a trajectory may be trained on: faults.sql does, for each of these ids,
-- whatever its age. A cohort fills over several calls: its members stay, and a row that appears
-- later is added after them, even if its id is smaller. Parameters: policy, learning alias, head,
-- maximum rows, generations to skip, surfaces that were timed, how long their answers take in
-- seconds.
with head as (
    -- open generations of the head are not older than this; a minute for clocks that differ
    select first_generation_id(v.created_at - interval '1 minute') as oldest
    from version v where v.policy = $1 and v.serial = $3
),
arrived as (
    select coalesce(min(o.caught_up_to), clock_timestamp()) as until
    from consumer_offset o
    where o.consumer = 'sink' and o.updated_at > clock_timestamp() - interval '1 minute'
),
boundary as materialized (
    select defined.surface,
           least(
               first_generation_id((select until from arrived) - make_interval(secs => coalesce(timed.seconds, 0))),
               (select o.generation_id
                from open_generation o
                where o.surface = defined.surface
                  -- nobody holds a cohort back with generations that nobody sampled
                  and o.proven
                  and o.generation_id >= (select oldest from head)
                  -- no join, so that Postgres asks for the oldest ones only, one by one
                  and (select waiting.policy = $1 and waiting.purpose = 'production' and waiting.arm = $2
                              and waiting.version = $3 and waiting.consent
                              and waiting.tenant_id = any ((select consenting_tenants($1))::text[])
                              and provenance_fault(waiting.sampler, waiting.replica, waiting.policy, waiting.arm,
                                                   waiting.version, waiting.sampled_at, waiting.stored_at) is null
                       from generation waiting where waiting.id = o.generation_id)
                order by o.generation_id
                limit 1)) as id
    -- trajectories of other surfaces have no reward
    from (select distinct surface from reward_definition) as defined
    left join unnest($6::text[], $7::double precision[]) as timed (surface, seconds) using (surface)
)
select g.id
from generation g
join trajectory t on t.generation_id = g.id
where g.policy = $1
  and g.purpose = 'production'
  and g.arm = $2
  and g.version = $3
  and t.reward is not null
  and g.id <> all ($5)
  and not exists (select from disposition d where d.generation_id = g.id)
  -- the end of the index range
  and g.id < (select b.id from boundary b order by b.id desc limit 1)
  and g.id < (select b.id from boundary b where b.surface = g.surface)
order by g.id
limit $4
