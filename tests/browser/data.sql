-- What the browser test looks at: a policy `demo` whose realtime run has made versions 1 to 60, a canary with evidence, two
-- replicas, and some hours of answers. Numbers are made from a fixed seed. Version 1 may have been imported before.
select setseed(0.5);

insert into version (policy, serial, root, parent, line, branch, manifest_key, image_bytes, created_at)
values ('demo', 1, sha256('1'), null, 'realtime', 0, 'policy/demo/version/0000000001.json', 3400000, now() - interval '3 hours')
on conflict (policy, serial) do update set created_at = excluded.created_at;
insert into run (id, kind, policy, line, status, config, base_version, steps_done, started_at)
values ('01990000-0000-7000-8000-0000000000aa', 'realtime', 'demo', 'realtime', 'running', '{}', 1, 59, now() - interval '3 hours'),
       ('01990000-0000-7000-8000-0000000000ab', 'grpo', 'demo', 'run-01990000', 'succeeded', '{"steps": 20}', 1, 20, now() - interval '2 hours');
insert into step (run_id, step, version, parent, cohort_digest, metrics, checkpoint_key, run_state_digest, committed_at)
select '01990000-0000-7000-8000-0000000000aa', n, n + 1, n, sha256(n::text::bytea),
       jsonb_build_object('loss', 0.9 * exp(-n / 40.0) + 0.05 * random(), 'kl', 1e-5 * (1 + random()), 'entropy', 2.1 - n / 60.0 + 0.05 * random(),
                          'reward_mean', 0.2 + 0.5 * (1 - exp(-n / 25.0)) + 0.05 * (random() - 0.5), 'reward_std', 0.4, 'trajectories', 64,
                          'tokens', 2048, 'stale', jsonb_build_object('tokens', (100 * random())::int)),
       'private/' || n, sha256(n::text::bytea), now() - interval '3 hours' + n * interval '3 minutes'
from generate_series(1, 59) n;
insert into version (policy, serial, root, parent, line, branch, run_id, step, manifest_key, delta_bytes, image_bytes, created_at)
select 'demo', step + 1, sha256((step + 1)::text::bytea), step, 'realtime', 0, run_id, step,
       'policy/demo/version/' || lpad((step + 1)::text, 10, '0') || '.json', (60000 + 20000 * random())::bigint, 3400000, committed_at
from step where run_id = '01990000-0000-7000-8000-0000000000aa';
insert into line (policy, line, head) values ('demo', 'realtime', 60) on conflict (policy, line) do update set head = excluded.head;

insert into assignment (policy, epoch, alias, version, follows, created_at)
values ('demo', 1, 'base', 1, null, now() - interval '3 hours'), ('demo', 1, 'champion', 1, null, now() - interval '3 hours');
insert into assignment (policy, epoch, alias, version, follows, created_at)
select 'demo', n + 1, 'learner', n + 1, 'realtime', now() - interval '3 hours' + n * interval '3 minutes' from generate_series(1, 59) n;
insert into assignment (policy, epoch, alias, version, follows, created_at)
values ('demo', 70, 'champion', 41, null, now() - interval '50 minutes');
insert into assignment (policy, epoch, alias, version, share, created_at)
values ('demo', 71, 'canary', 52, 0.1, now() - interval '20 minutes');
insert into experiment (policy, epoch, salt, arms, source, actor, reason)
values ('demo', 1, '', '[{"alias": "learner", "weight": 0.3, "explore": 0.02}, {"alias": "champion", "weight": 0.5}, {"alias": "base", "weight": 0.2}]',
        'request', 'ada', 'the first experiment');
with moved (alias, from_version, to_version, kind, epoch, actor, reason, at) as (
    select 'learner', n, n + 1, 'follow', (n + 1)::bigint, 'follow', 'the line realtime has a new head', now() - interval '3 hours' + n * interval '3 minutes'
    from generate_series(1, 59) n
    union all
    values ('base', null, 1, 'pin', 1::bigint, 'release', 'the first version of the line', now() - interval '3 hours'),
           ('canary', null, 52, 'canary', 71::bigint, 'Ada, release', 'some of champion''s users get it', now() - interval '20 minutes'),
           ('champion', 1, 41, 'promote', 70::bigint, 'Ada, release', 'passed the evaluation of last night', now() - interval '50 minutes')
),
released as (
    insert into release (id, policy, alias, from_version, to_version, kind, status, created_at)
    select uuidv7(at - clock_timestamp()), 'demo', alias, from_version, to_version, kind, 'done', at from moved
    returning id, alias, to_version
)
insert into transition (id, release_id, epoch, actor, reason, at)
select uuidv7(moved.at - clock_timestamp()), released.id, moved.epoch, moved.actor, moved.reason, moved.at
from released join moved using (alias, to_version);

insert into canary (id, policy, version, control, strategy, state, step, actor, reason, created_at, step_since)
values ('01990000-0000-7000-8000-0000000000c1', 'demo', 41, 1, '{"steps": [{"setWeight": 10.0}, {"analysis": {"successCondition": "better", "timeout": "1d"}}], "judge": {"margin": 0.02}}',
        'champion', 2, 'Ada, release', 'passed the evaluation of last night', now() - interval '2 hours', now() - interval '50 minutes'),
       ('01990000-0000-7000-8000-0000000000c2', 'demo', 52, 41,
        '{"steps": [{"setWeight": 10.0}, {"analysis": {"successCondition": "not_worse", "timeout": "1d"}}, {"setWeight": 50.0}, {"analysis": {"successCondition": "better", "timeout": "1d"}}], "judge": {"margin": 0.02, "effect": 0.05, "alpha": 0.05, "usersMin": 20}}',
        'held', 3, 'Ada, release', 'more reward in the nightly run', now() - interval '25 minutes', now() - interval '8 minutes');
insert into judgment (policy, version, verdict, canary_id, actor, reason, at)
values ('demo', 41, 'good', '01990000-0000-7000-8000-0000000000c1', 'release', 'rewards: better by 0.031 or more', now() - interval '50 minutes');
insert into canary_transition (canary_id, event, from_state, to_state, step, epoch, share, actor, reason, evidence, at)
select '01990000-0000-7000-8000-0000000000c2', event, before, state, step, 71, share, actor, reason,
       case when users > 0 then
       jsonb_build_object('reward', jsonb_build_object('difference', 0.03 + 0.02 / (n + 1), 'low', 0.035 - 0.16 / (n + 1), 'high', 0.035 + 0.2 / (n + 1)),
           'canary', jsonb_build_object('version', 52, 'users', users, 'answers', users * 6, 'mean_reward', 0.55, 'mean_tokens', 11.8, 'declined', users, 'aborted', users / 9, 'unscored', users),
           'champion', jsonb_build_object('version', 41, 'users', users * 5, 'answers', users * 30, 'mean_reward', 0.51, 'mean_tokens', 12.1, 'declined', users * 6, 'aborted', users / 2, 'unscored', users * 4),
           'found', jsonb_build_object('summary', 'version 52 beside version 41: at most 0.02 worse, and not known to be better yet')) end,
       now() - interval '25 minutes' + n * interval '4 minutes'
from (values (0, 'approve', 'proposed', 'gated', 0, 0.0, 'release', 'no approval is required', 0),
             (1, 'pass', 'gated', 'canary', 0, 0.1, 'release', 'all gates passed', 0),
             (2, 'step', 'canary', 'canary', 1, 0.1, 'release', '10% of champion''s users get it', 40),
             (3, 'step', 'canary', 'canary', 2, 0.1, 'release', 'it is not worse: version 52 beside version 41', 160),
             (4, 'step', 'canary', 'canary', 3, 0.5, 'release', '50% of champion''s users get it', 420),
             (5, 'hold', 'canary', 'held', 3, 0.5, 'Ada, release', 'wait for the day shift', 900))
     as one (n, event, before, state, step, share, actor, reason, users);

insert into replica (id, cluster, policy, address, epoch, resident, ready, reported_at)
select 'replica-' || n, case when n < 3 then 'eu' else 'us' end, 'demo', 'http://10.0.0.' || n || ':8000', 71,
       '[{"version": 41, "root": "", "aliases": ["champion"]}, {"version": 60, "root": "", "aliases": ["learner"]},
         {"version": 52, "root": "", "aliases": ["canary"]}, {"version": 1, "root": "", "aliases": ["base"]}]', true,
       now() + interval '10 minutes'
from generate_series(1, 4) n;
insert into swap (replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms, at)
select 'replica-' || (1 + n % 4), 'demo', 30 + n / 2, 30 + n / 2, 20 + 15 * random(), 6 + random(), 12 + 4 * random(), 0.2 + 0.3 * random(),
       now() - interval '1 hour' + n * interval '1 minute'
from generate_series(1, 58) n;
insert into run_event (run_id, level, message, data)
values ('01990000-0000-7000-8000-0000000000aa', 'warn', 'the arm learner shows 12% of its generations, and 15% is the limit', '{"alarm": "show_rate", "state": "began"}'),
       ('01990000-0000-7000-8000-0000000000aa', 'error', 'a step was refused: its KL was 0.31 nats a token', '{"code": "kl"}');

insert into reward_definition (surface, version, definition) values ('completion', 1, '{}') on conflict do nothing;
insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                        episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p, finish_reason,
                        declined, finished_at, sampled_at, proven)
select uuidv7(-make_interval(secs => 6 * n)), 'default', 'demo', version, version, jsonb_build_array(jsonb_build_array(version, 12)), sha256(''),
       'realtime', 'replica-' || (1 + n % 4), 'production', 'completion', uuidv7(), 'u' || n % 97, arm, 0.3, '{5}', '{6}', '{-1}', 1, 1,
       case when random() < 0.03 then 'abort' else 'stop' end, random() < 0.1, now() - make_interval(secs => 6 * n),
       now() - make_interval(secs => 6 * n), true
from (select n, arm, case arm when 'champion' then 41 when 'base' then 1 when 'canary' then 52 else 60 - n / 30 end as version
      from (select n, (array['learner', 'champion', 'champion', 'base', 'canary'])[1 + n % 5] as arm from generate_series(1, 1500) n) drawn) of_arm;
insert into trajectory (generation_id, surface, reward_definition, reward, censor_code, signal, closed_at)
select id, 'completion', 1, case when scored then reward end, case when not scored then 'no_feedback' end,
       case when not scored then null when reward > 0 then 'accept' else 'reject' end, sampled_at + interval '1 minute'
from (select id, sampled_at, random() < 0.7 as scored, (array[-0.5, 0, 0.5, 1])[1 + floor(random() * 3 + version / 60.0)::int] as reward
      from generation where policy = 'demo' and sampled_at < now() - interval '2 minutes') closed;
insert into disposition (generation_id, kind, code, run_id, step, decided_at)
select id, kind, case kind when 'dropped' then 'stale' end, '01990000-0000-7000-8000-0000000000aa',
       case kind when 'trained' then greatest(1, version - 1) end, now()
from (select g.id, g.version, case when g.arm <> 'learner' then 'held_out' when random() < 0.85 then 'trained' else 'dropped' end as kind
      from generation g join trajectory t on t.generation_id = g.id where g.policy = 'demo' and t.reward is not null) decided;
insert into trajectory_use (generation_id, run_id, step, purpose)
select generation_id, run_id, step, 'trained' from disposition where kind = 'trained' and run_id = '01990000-0000-7000-8000-0000000000aa';

-- The newest answers of version 1: two to one prompt, in tokens of demo/models/base.
insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                        episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p, finish_reason,
                        declined, finished_at, sampled_at, proven)
select uuidv7(), 'default', 'demo', 1, 1, jsonb_build_array(jsonb_build_array(1, cardinality(answer))), sha256(''), 'realtime', 'replica-1',
       'production', 'completion', uuidv7(), 'u' || n, 'base', 0.2,
       '{280, 1138, 312, 1218, 415, 1987, 17, 202, 514, 338, 1344, 360, 304, 12, 355, 224, 1}', answer,
       array_fill(-1::real, array[cardinality(answer)]), 1, 1, 'stop', false, now(), now(), true
from (values (1, '{902, 282, 2}'::integer[]), (2, '{88, 427, 282, 2}')) as one (n, answer);

insert into tide_minute (policy, replica, engine, minute, process, slots, seconds, production_slot_seconds, production_peak, expected,
                         lendable_slot_seconds, lent_slot_seconds, slot_limit, whole, why, taken_back, taking_back_ms_max, alone, beside)
select 'demo', 'replica-' || r, 0, date_trunc('minute', now()) - make_interval(mins => n), uuidv7(), 8, 60,
       120 + 60 * sin(n / 9.0) + 20 * random(), 4, 3.5, 280 - 60 * sin(n / 9.0), 230 - 60 * sin(n / 9.0), 4, false, 'expected', n % 3, 4.5, '{}', '{}'
from generate_series(1, 55) n, generate_series(1, 2) r;
