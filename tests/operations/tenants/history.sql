-- Policy `traced` belongs to the tenant `ours`. The step of two_versions.sql was trained on a
-- generation of each of two tenants. Each has another one, of version 2, that is open.
insert into tenant (id) values ('ours'), ('theirs') on conflict do nothing;
insert into policy (name, tenant_id) values ('traced', 'ours');
insert into tenant_consent (policy, tenant_id, given_by) values ('traced', 'theirs', 'a test');

insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose,
                        surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs,
                        temperature, top_p, finish_reason, declined, sampled_at)
select id::uuid, tenant, 'traced', version, version, jsonb_build_array(jsonb_build_array(version, 2)),
       case version when 1 then '\x01'::bytea else '\x02'::bytea end,
       'realtime', 'replica-1', 'production', 'completion', id::uuid, 'ada', 'champion', 0.6, '{5}', '{6,7}', '{-1,-1}',
       1, 1, 'stop', false, now()
from (values ('01980000-0000-7000-8000-000000000001', 'ours', 1),
             ('01980000-0000-7000-8000-000000000002', 'theirs', 1),
             ('01980000-0000-7000-8000-000000000003', 'ours', 2),
             ('01980000-0000-7000-8000-000000000004', 'theirs', 2)) as sampled (id, tenant, version);
insert into trajectory (generation_id, surface, reward_definition, reward, signal)
select id::uuid, 'completion', 1, 0.75, 'accept'
from (values ('01980000-0000-7000-8000-000000000001'), ('01980000-0000-7000-8000-000000000002')) as closed (id);
insert into disposition (generation_id, kind, run_id, step)
select generation_id, 'trained', '01980000-0000-7000-8000-0000000000aa', 1 from trajectory;
insert into trajectory_use (generation_id, run_id, step, purpose)
select generation_id, '01980000-0000-7000-8000-0000000000aa', 1, 'trained' from trajectory;
