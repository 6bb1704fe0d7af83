-- Rollouts of GRPO runs: a harness, the trainer's own or one outside, takes one for a time, lets the policy act, and posts the
-- reward. One row for each; written by the crate `trainer` alone (its API makes the changes that a harness asks for). Nothing else is
-- changed. 20261201000002 says which users may do what with it.

create table rollout (
    -- Also the episode of its generations.
    id              uuid not null,
    run_id          uuid not null references run (id),
    task_id         text not null,
    -- The rollouts of one draw of a task.
    group_id        uuid not null,
    -- Which draw of the run, from 0: groups are trained on in this order.
    draw            bigint not null,
    -- How many rollouts of the group were lost before it and are replaced by it.
    attempt         integer not null default 0,
    -- offered:  waits for a harness
    -- leased:   a harness works on it, until expires_at
    -- rewarded: the harness has posted the reward
    -- failed:   it has no reward: the harness gave up, or said nothing until expires_at (see `code`)
    -- settled:  the end of its episode is in the log, with the reward if it has one
    -- spent:    a step was made of its group, or the group has nothing to learn from
    state           text not null default 'offered',
    -- Why it has no reward: a code such as lease_expired.
    code            text,
    -- What the harness said when it gave up.
    reason          text,
    -- The label of the key that leased it.
    holder          text,
    -- SHA-256 of the secret that its lease has. The agent that samples does not know it, so it cannot reward itself.
    secret_digest   bytea,
    -- The generations that the trainer's own harness received. Null: none, or another harness made it.
    answers         uuid[],
    reward          double precision,
    offered_at      timestamptz not null default now(),
    leased_at       timestamptz,
    expires_at      timestamptz,
    -- When it was rewarded or failed.
    finished_at     timestamptz,
    settled_at      timestamptz,
    constraint rollout_pkey primary key (id),
    constraint rollout_task foreign key (run_id, task_id) references task (run_id, id),
    constraint rollout_state check (state in ('offered', 'leased', 'rewarded', 'failed', 'settled', 'spent')),
    constraint rollout_lease check (state <> 'leased' or (holder is not null and expires_at is not null)),
    constraint rollout_reward check (state <> 'rewarded' or reward is not null)
);
-- What a run still works on is little; what it has spent is much.
create index rollout_unspent on rollout (run_id, draw, id) where state <> 'spent';
create index rollout_by_run on rollout (run_id, state);
