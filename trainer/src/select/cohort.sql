-- The oldest trajectories that may be trained on, ordered by generation. Two things end a surface's
-- cohort, so that neither fast feedback nor short answers are favored:
-- - its oldest generation of the head whose horizon is still open;
-- - the time until which all its answers have arrived: what the tables hold, less the time that
--   nearly all of its answers take. An id is the time of an answer's first token, and its row
--   appears after the last, so a younger trajectory may have overtaken an answer that is still
--   being sampled.
-- A surface whose answers were not timed ends at the oldest open generation of any surface.
--
-- Runs right after set_aside.sql in the same snapshot, so rows that it refuses are not here. A
-- cohort fills over several calls: its members stay, and a row that appears later is added after
-- them, even if its id is smaller. Parameters: policy, learning alias, head, maximum rows,
-- generations to skip, seconds that a parent may arrive late, surfaces that were timed, how long
-- their answers take in seconds.
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
    select timed.surface,
           least(
               first_generation_id((select until from arrived) - make_interval(secs => timed.seconds)),
               (select o.generation_id
                from open_generation o
                join generation waiting on waiting.id = o.generation_id
                where o.surface = timed.surface
                  and o.generation_id >= (select oldest from head)
                  and waiting.policy = $1 and waiting.purpose = 'production' and waiting.arm = $2
                  and waiting.version = $3 and waiting.consent
                  -- nobody holds a cohort back with generations that nobody sampled
                  and provenance_fault(waiting.sampler, waiting.replica, waiting.policy, waiting.arm, waiting.version,
                                       waiting.sampled_at, waiting.stored_at) is null
                order by o.generation_id
                limit 1)) as id
    from unnest($7::text[], $8::double precision[]) as timed (surface, seconds)
),
boundary_of_others as (
    select coalesce(
        (select o.generation_id
         from open_generation o
         join generation waiting on waiting.id = o.generation_id
         where waiting.policy = $1 and waiting.purpose = 'production' and waiting.arm = $2
         order by o.generation_id
         limit 1),
        'ffffffff-ffff-ffff-ffff-ffffffffffff') as id
)
select g.id, g.tenant_id, g.user_key, g.replica,
       g.surface, g.group_id, g.version_oldest, g.prompt_ids, g.token_ids, g.logprobs, g.train_mask, g.temperature,
       g.top_p, g.sampling as "sampling: Json<Sampling>",
       g.declined, g.decline_suppressed, g.exploration_share, t.reward as "reward!",
       true as "reward_in_bounds!",
       g.payload_digest is not null or g.prompt_prefix_len > 0 as "in_parts!",
       exists (select from payload_reference r where r.generation_id = g.id and r.kind = 'experts') as "routed!",
       g.signature, g.unsigned_digest, coalesce(g.finished_at, g.sampled_at) as "finished_at!",
       (select s.public_key from sampler s where s.id = g.sampler) as public_key,
       provenance_fault(g.sampler, g.replica, g.policy, g.arm, g.version, g.sampled_at, g.stored_at) as fault,
       clock_timestamp() - t.closed_at < make_interval(secs => $6) as "young!"
from generation g
join trajectory t on t.generation_id = g.id
where g.policy = $1
  and g.purpose = 'production'
  and g.arm = $2
  and g.version = $3
  and t.reward is not null
  and g.id <> all ($5)
  and not exists (select from disposition d where d.generation_id = g.id)
  and g.id < coalesce((select b.id from boundary b where b.surface = g.surface), (select id from boundary_of_others))
order by g.id
limit $4
