-- Policy `traced`: version 1 was imported, and step 1 of its realtime run made version 2.
insert into version (policy, serial, root, parent, line, branch, manifest_key, image_bytes)
values ('traced', 1, '\x01', null, 'realtime', 0, 'policy/traced/version/0000000001.json', 100);

insert into run (id, kind, policy, line, status, config)
values ('01980000-0000-7000-8000-0000000000aa', 'realtime', 'traced', 'realtime', 'running', '{}');

insert into step (run_id, step, version, parent, cohort_digest, metrics, checkpoint_key, run_state_digest)
values ('01980000-0000-7000-8000-0000000000aa', 1, 2, 1, '\xcc', '{}', 'private/1', sha256(''));

insert into version (policy, serial, root, parent, line, branch, run_id, step, manifest_key, delta_bytes, image_bytes)
values ('traced', 2, '\x02', 1, 'realtime', 0, '01980000-0000-7000-8000-0000000000aa', 1,
        'policy/traced/version/0000000002.json', 10, 100);
