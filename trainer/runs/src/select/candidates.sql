-- The oldest queued trajectories, by their last generation: the next to be checked and to join the
-- cohort. A generation must be of one of the given versions. An episode needs a turn of one of them;
-- the last of those stands for it here. Two things end a surface's cohort, so that neither fast feedback
-- nor short answers nor short sessions are favored:
-- - the oldest of its generations and episodes that are still open, an episode by the last of its
--   turns so far that could be trained on;
-- - the time until which all its answers have arrived: what the tables hold, less the time that
--   nearly all of its answers take. An id is the time of an answer's first token, and its row
--   appears after the last, so a younger trajectory may have overtaken an answer that is still
--   being sampled. On a surface without an answer in the last hour, that time is not known yet and 0.
-- By the first turn, one long session would stop its surface until it ends.
--
-- Nothing here says that a trajectory may be trained on: faults.sql does, for each of its
-- generations, whatever their age. A cohort fills over several calls: its members stay, and a row
-- that appears later is added after them, even if its id is smaller. Parameters: policy, arms
-- that are learned from, versions that they may come from (the head first), maximum rows, last
-- generations of trajectories to skip, surfaces that were timed, how long their answers take in
-- seconds.
with admitted as (
    -- open generations of these versions are not older than this; a minute for clocks that differ
    select first_generation_id(min(v.created_at) - interval '1 minute') as oldest
    from version v where v.policy = $1 and v.serial = any ($3)
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
                  and o.generation_id >= (select oldest from admitted)
                  -- no join, so that Postgres asks for the oldest ones only, one by one
                  and (select waiting.policy = $1 and waiting.purpose = 'production' and waiting.arm = any ($2)
                              and waiting.version = any ($3)
                              and waiting.consent
                              and waiting.tenant_id = any ((select consenting_tenants($1))::text[])
                              and provenance_fault(waiting.sampler, waiting.replica, waiting.policy, waiting.arm,
                                                   waiting.version, waiting.sampled_at, waiting.stored_at) is null
                              -- it is the last of its episode for which all of this holds
                              and not exists (
                                  select from open_generation later
                                  join generation turn on turn.id = later.generation_id
                                  where later.episode_id = o.episode_id and later.generation_id > o.generation_id
                                    and turn.id > o.generation_id and later.proven
                                    and turn.tenant_id = waiting.tenant_id
                                    and turn.policy = $1 and turn.purpose = 'production' and turn.arm = any ($2)
                                    and turn.version = any ($3) and turn.consent
                                    and provenance_fault(turn.sampler, turn.replica, turn.policy, turn.arm, turn.version,
                                                         turn.sampled_at, turn.stored_at) is null)
                       from generation waiting where waiting.id = o.generation_id)
                order by o.generation_id
                limit 1)) as id
    -- trajectories of other surfaces have no reward
    from (select distinct surface from reward_definition) as defined
    left join unnest($6::text[], $7::double precision[]) as timed (surface, seconds) using (surface)
)
select candidate.id as "id!", candidate.episode_turns
from unnest($3::bigint[]) as sampled_by (version)
cross join lateral ( -- each version's rows by the index, in order
    select g.id, t.episode_turns
    from generation g
    -- one by one, or Postgres may read all trajectories
    cross join lateral (select t.reward, t.episode_id, t.episode_turns from trajectory t where t.generation_id = g.id offset 0) as t
    where g.policy = $1
      and g.purpose = 'production'
      and g.arm = any ($2)
      and g.version = sampled_by.version
      and t.reward is not null
      and g.id <> all ($5)
      and not exists (select from disposition d where d.generation_id = g.id)
      -- the end of the index range
      and g.id < (select b.id from boundary b order by b.id desc limit 1)
      and g.id < (select b.id from boundary b where b.surface = g.surface)
      -- the last of its episode for which all of this holds
      and (t.episode_id is null or not exists (
          select from trajectory later
          join generation turn on turn.id = later.generation_id
          where later.episode_id = t.episode_id and later.generation_id > g.id and turn.id > g.id
            and later.reward is not null
            and turn.tenant_id = g.tenant_id and turn.policy = $1 and turn.arm = any ($2) and turn.version = any ($3)
            and not exists (select from disposition d where d.generation_id = turn.id)))
    order by g.id
    limit $4
) as candidate
order by candidate.id
limit $4
