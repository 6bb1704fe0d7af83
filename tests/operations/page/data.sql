-- A canary of version 2 beside version 1 with evidence, and people who write markup into their reasons.
insert into assignment (policy, epoch, alias, version, follows)
values ('traced', 1, 'champion', 1, null), ('traced', 1, 'base', 1, null), ('traced', 2, 'learner', 2, 'realtime');
insert into assignment (policy, epoch, alias, version, share) values ('traced', 3, 'canary', 2, 0.5);
insert into experiment (policy, epoch, salt, arms, source, actor, reason)
values ('traced', 1, '', '[{"alias": "champion", "weight": 0.8}, {"alias": "learner", "weight": 0.2, "explore": 0.02}]',
        'request', 'ada', 'a test');
with released as (
    insert into release (policy, alias, from_version, to_version, kind, status)
    values ('traced', 'champion', null, 1, 'pin', 'done') returning id
)
insert into transition (release_id, epoch, actor, reason) select id, 1, 'ada', '<script>alert(1)</script>' from released;

insert into canary (id, policy, version, control, strategy, state, step, actor, reason)
values ('01980000-0000-7000-8000-0000000000ca', 'traced', 2, 1,
        '{"steps": [{"setWeight": 50.0}, {"pause": {}}], "judge": {"margin": 0.02}}', 'canary', 1, 'ada', 'try <b>bold</b>');
insert into canary_transition (canary_id, event, from_state, to_state, step, epoch, share, actor, reason, evidence)
select '01980000-0000-7000-8000-0000000000ca', 'step', 'canary', 'canary', n, 3, 0.5, 'release', 'look ' || n,
       jsonb_build_object('reward', jsonb_build_object('difference', 0.01 * n, 'low', 0.01 * n - 0.1 / n, 'high', 0.01 * n + 0.1 / n),
                          'canary', jsonb_build_object('version', 2, 'users', 10 * n, 'answers', 50 * n),
                          'champion', jsonb_build_object('version', 1, 'users', 9 * n, 'answers', 40 * n))
from generate_series(1, 3) n;

insert into replica (id, cluster, policy, address, epoch, resident, ready)
values ('replica-<1>', 'here', 'traced', 'http://127.0.0.1:8000', 2,
        '[{"version": 1, "root": "01", "aliases": ["champion", "base"]}, {"version": 2, "root": "02", "aliases": ["learner"]}]', true);
insert into swap (replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms)
values ('replica-<1>', 'traced', 2, 2, 12, 3, 4, 0.5);
insert into run_event (run_id, level, message, data)
values ('01980000-0000-7000-8000-0000000000aa', 'warn', 'shows <script>3%</script>', '{"alarm": "show_rate", "state": "ended"}');
insert into tide_minute (policy, replica, engine, minute, process, slots, seconds, production_slot_seconds, production_peak,
                         lendable_slot_seconds, lent_slot_seconds, whole, taken_back, taking_back_ms_max, alone, beside)
select 'traced', 'replica-<1>', 0, date_trunc('minute', now()) - make_interval(mins => n), uuidv7(), 8, 60, 120, 3, 240, 200,
       false, 0, 0, '{}', '{}'
from generate_series(1, 3) n;

-- Answers of now: of the policy's tenant, and of another one.
insert into tenant (id) values ('other') on conflict do nothing;
insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose,
                        surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs,
                        temperature, top_p, finish_reason, declined, sampled_at, proven)
select uuidv7(), tenant, 'traced', 2, 2, '[[2, 2]]', '\x02', 'realtime', 'replica-<1>', 'production', 'completion', uuidv7(),
       'ada', 'arm-of-' || tenant, 0.6, '{5}', '{6,7}', '{-1,-1}', 1, 1, 'stop', false, clock_timestamp(), true
from unnest(array['default', 'other']) tenant;
insert into trajectory (generation_id, surface, reward_definition, reward, signal)
select id, 'completion', 1, 0.25, 'accept' from generation where arm like 'arm-of-%';
