-- The state of the loop for the live line: learner, run, lag, latest delta and latest swap.
-- $1 policy
select
    (select version from alias where policy = $1 and alias = 'learner' and not withdrawn) as learner,
    (select steps_done from run where policy = $1 and kind = 'realtime' order by created_at desc limit 1) as step,
    (select status from run where policy = $1 and kind = 'realtime' order by created_at desc limit 1) as status,
    (select reason from run where policy = $1 and kind = 'realtime' order by created_at desc limit 1) as reason,
    -- How far the tables are behind the log, for the partition with the largest lag.
    (select greatest(extract(epoch from now() - min(caught_up_to)), 0)::float8 from consumer_offset where consumer = 'sink') as lag_seconds,
    (select delta_bytes::float8 / nullif(image_bytes, 0)
     from version
     where policy = $1 and line = 'realtime' and delta_bytes is not null
     order by serial desc
     limit 1) as delta_ratio,
    (select pause_ms from swap where policy = $1 order by at desc limit 1) as swap_pause_ms
