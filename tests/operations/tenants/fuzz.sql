-- What a tenant's policy has. $1 policy, $2 tenant, $3 a text that only the tenant may see.
with known_tenant as (insert into tenant (id) values ($2) on conflict do nothing),
owned as (insert into policy (name, tenant_id) values ($1, $2) on conflict do nothing),
versions as (
    insert into version (policy, serial, root, parent, line, branch, manifest_key, image_bytes)
    values ($1, 1001, decode(repeat('01', 32), 'hex'), null, 'old', 0, $3, 100),
           ($1, 1002, decode(repeat('02', 32), 'hex'), 1001, 'old', 0, $3, 100)
),
line as (insert into line (policy, line, head) values ($1, 'old', 1002)),
run as (
    insert into run (kind, policy, line, status, reason, config, base_version)
    select 'grpo', $1, 'old', status, $3, jsonb_build_object('note', $3), 1001
    from unnest(array['failed', 'queued']) as status
    returning id, status
),
event as (
    insert into run_event (run_id, level, message, data) select id, 'info', $3, jsonb_build_object('note', $3) from run
),
step as (
    insert into step (run_id, step, version, parent, cohort_digest, metrics, checkpoint_key, run_state_digest)
    select id, 1, 1002, 1001, '\xcc', jsonb_build_object('note', $3), $3, sha256('') from run where status = 'failed'
),
replica as (
    insert into replica (id, cluster, policy, address, epoch, resident, ready)
    values ('replica-of-' || $2, $3, $1, $3, 1, '[]', true)
),
swap as (
    insert into swap (replica, policy, version, epoch, fetch_ms, verify_ms, stage_ms, pause_ms)
    values ($3, $1, 1002, 1, 1, 1, 1, 1)
),
release as (
    insert into release (policy, alias, from_version, to_version, kind, status)
    values ($1, 'old', 1001, 1002, 'promote', 'refused')
    returning id
),
transition as (insert into transition (release_id, actor, reason) select id, $3, $3 from release)
select array_agg(id order by status) as runs from run
