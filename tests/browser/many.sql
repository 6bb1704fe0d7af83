-- Eight weeks of earlier answers beside data.sql: `rows` of them, each with what its user thought of it and what became of it.
create function pg_temp.at(n bigint, total bigint) returns timestamptz language sql immutable as
$$ select date_trunc('hour', now()) - interval '4 hours' - interval '56 days' * ((total - n)::float8 / total) $$;
create function pg_temp.nth(n bigint, total bigint) returns uuid language sql immutable as
$$ select (left(first_generation_id(pg_temp.at(n, total))::text, 14) || '7' || substr(md5(n::text), 1, 3) || '-8' || substr(md5(n::text), 4, 3)
           || '-' || substr(md5(n::text), 7, 12))::uuid $$;
-- As after a year: every week has a partition, and none is left of the time before the partitions.
do $do$ begin
    execute (select coalesce(string_agg(format('drop table %I;', relname), ' '), 'select 1')
             from pg_class where relname like 'trajectory\_before\_%' and relkind = 'r');
end $do$;
select create_generation_partition('generation_' || to_char(monday, 'IYYY"w"IW'), first_generation_id(monday),
                                   first_generation_id(monday + interval '7 days')),
       create_trajectory_partition('trajectory_' || to_char(monday, 'IYYY"w"IW'), first_generation_id(monday),
                                   first_generation_id(monday + interval '7 days'))
from generate_series(date_trunc('week', now() at time zone 'utc') - interval '9 weeks',
                     date_trunc('week', now() at time zone 'utc') - interval '2 weeks', interval '1 week') as week (local),
     lateral (select local at time zone 'utc' as monday) m;
insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                        episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p, finish_reason,
                        declined, finished_at, sampled_at, proven)
select id, 'default', 'demo', 1, 1, '[[1, 12]]', sha256(''), 'realtime', 'replica-' || (1 + n % 4), 'production', 'completion', id,
       'u' || n % 9973, case n % 2 when 0 then 'champion' else 'base' end, 0.5, '{1, 2, 3, 4, 5, 6, 7, 8}', '{9, 10, 11, 2}',
       '{-0.5, -0.25, -1, -2}', 1, 1, case n % 31 when 0 then 'abort' else 'stop' end, n % 10 = 0, at + interval '1 second', at, true
from generate_series(1::bigint, :rows) n, lateral (select pg_temp.nth(n, :rows) as id, pg_temp.at(n, :rows) as at) one;
insert into trajectory (generation_id, surface, reward_definition, reward, censor_code, signal, feedback_at, closed_at)
select pg_temp.nth(n, :rows), 'completion', 1, case when n % 5 < 3 then n % 5 / 4.0 end, case when n % 5 >= 3 then 'no_feedback' end,
       'accept', at + interval '1 second', at + interval '3 seconds'
from generate_series(1::bigint, :rows) n, lateral (select pg_temp.at(n, :rows) as at) one;
insert into disposition (generation_id, kind, code, run_id, step, decided_at)
select pg_temp.nth(n, :rows), 'held_out', null, '01990000-0000-7000-8000-0000000000aa', null, pg_temp.at(n, :rows) + interval '4 seconds'
from generate_series(1::bigint, :rows) n where n % 5 < 3;
vacuum analyze;
