-- Figures of the loop during the run: steps, size of deltas, the engine's pauses for swaps, and the
-- largest difference between the trainer's logprobs and the logged ones.
-- $1 policy, $2 start of the run
select
    steps.taken as "steps!",
    steps.parity_max,
    deltas.ratio as delta_ratio,
    swaps.taken as "swaps!",
    swaps.p50 as swap_pause_ms_p50,
    swaps.max as swap_pause_ms_max
from
    (select count(*) as taken,
            -- `remote`: of other engines than ours
            -- what older versions sampled is not compared; a step may have nothing else
            max(greatest((s.metrics #>> '{mismatch,difference_max}')::float8,
                         (s.metrics #>> '{remote,difference_max}')::float8))
                filter (where coalesce((s.metrics #>> '{mismatch,tokens}')::int8, 0)
                              + coalesce((s.metrics #>> '{remote,tokens}')::int8, 0) > 0) as parity_max
     from step s
     join run r on r.id = s.run_id
     where r.policy = $1 and r.kind = 'realtime' and s.committed_at >= $2) steps,
    (select sum(delta_bytes)::float8 / nullif(sum(image_bytes), 0)::float8 as ratio
     from version
     where policy = $1 and line = 'realtime' and delta_bytes is not null and created_at >= $2) deltas,
    (select count(*) as taken,
            percentile_cont(0.5) within group (order by pause_ms) as p50,
            max(pause_ms) as max
     from swap
     where policy = $1 and at >= $2) swaps
