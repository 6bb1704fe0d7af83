-- A generation of each version of two_versions.sql. The step was trained on the first.
insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose,
                        surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs,
                        temperature, top_p, finish_reason, declined, sampled_at)
select id::uuid, 'default', 'traced', version, version, jsonb_build_array(jsonb_build_array(version, 2)), root::bytea,
       'realtime', 'replica-1', 'production', 'completion', id::uuid, 'ada', 'champion', 0.6, '{5}', '{6,7}', '{-1,-1}',
       1, 1, 'stop', false, now()
from (values ('01980000-0000-7000-8000-000000000001', 1, '\x01'),
             ('01980000-0000-7000-8000-000000000002', 2, '\x02')) as sampled (id, version, root);

insert into trajectory (generation_id, surface, reward_definition, reward, signal)
values ('01980000-0000-7000-8000-000000000001', 'completion', 1, 0.75, 'accept');

insert into disposition (generation_id, kind, run_id, step)
values ('01980000-0000-7000-8000-000000000001', 'trained', '01980000-0000-7000-8000-0000000000aa', 1);
insert into trajectory_use (generation_id, run_id, step, purpose)
values ('01980000-0000-7000-8000-000000000001', '01980000-0000-7000-8000-0000000000aa', 1, 'trained');
