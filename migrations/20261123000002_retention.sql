-- what is too old goes: whole weeks of `generation` with everything about them. What became of it stays in the books. Written by
-- the crate `ingest` alone, except for the dispositions, which the trainer forgets by itself.

-- Generations whose rows are gone, by what had become of them: with these the ledger adds up over all time.
create table expired_generation (
    until_id     uuid not null,                         -- every id below it is gone; of the partition that went
    tenant_id    text not null,
    policy       text not null,
    purpose      text not null,
    arm          text not null,
    day          date not null,                         -- UTC, on which they were sampled
    disposition  text not null,                         -- as in `ledger`
    code         text not null,                         -- empty: none
    generations  bigint not null,
    expired_at   timestamptz not null default now(),
    constraint expired_generation_pkey primary key (until_id, tenant_id, policy, purpose, arm, day, disposition, code)
);

-- From which id on generations are kept. One row once anything has gone; rises.
create table generation_horizon (
    one       boolean primary key default true,
    until_id  uuid not null,
    constraint generation_horizon_one check (one)
);

-- Payloads that nothing referred to any more when their last generation went; the objects are deleted behind it.
create table payload_unreferenced (
    tenant_id  text not null,
    digest     bytea not null,
    since      timestamptz not null default now(),
    constraint payload_unreferenced_pkey primary key (tenant_id, digest)
);

-- Events are forgotten by the time at which they came; the table is in that order, so a small index will do.
create index event_key_by_received_at on event_key using brin (received_at);
create index episode_end_by_stored_at on episode_end using brin (stored_at);

-- What keeps generations below `until`: 'open' (their horizon has not passed), 'queued' (a run that has not ended may train on
-- them) or 'parent' (a later turn that is open or queued shares its context). Null: nothing.
create function generations_needed(until uuid) returns text
language sql stable as $$
    with training as (
        select id, kind, policy from run where finished_at is null
    ),
    waiting as (
        select g.id, g.parent_id
        from trajectory t
        join generation g on g.id = t.generation_id
        where t.reward is not null
          and not exists (select from disposition d where d.generation_id = t.generation_id)
          and exists (select from training r where r.id = g.run_id
                      or r.kind = 'realtime' and r.policy = g.policy and g.purpose = 'production')
        union all
        select g.id, g.parent_id from open_generation o join generation g on g.id = o.generation_id
    )
    select case
        when exists (select from open_generation where generation_id < until) then 'open'
        when exists (select from waiting where id < until) then 'queued'
        when exists (select from waiting where parent_id < until) then 'parent'
    end
$$;

-- Forgets every generation below `until`: the partition of that name goes as a whole, what lies in others by rows.
-- The caller has asked generations_needed. Returns how many generations went.
create function expire_generations(partition_name text, until uuid, until_at timestamptz) returns bigint
language plpgsql as $$
declare
    gone bigint;
begin
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    insert into expired_generation (until_id, tenant_id, policy, purpose, arm, day, disposition, code, generations)
    select until, tenant_id, policy, purpose, arm, (sampled_at at time zone 'utc')::date, disposition, coalesce(code, ''), count(*)
    from ledger
    where generation_id < until
    group by tenant_id, policy, purpose, arm, (sampled_at at time zone 'utc')::date, disposition, coalesce(code, '');
    select coalesce(sum(generations), 0) into gone from expired_generation where until_id = until;

    -- Of an episode that goes on, what was said about the whole stays.
    create temporary table ended on commit drop as
        select episode_id, tenant_id from generation where id < until
        except select episode_id, tenant_id from generation where id >= until;
    analyze ended;
    delete from feedback f using ended e where f.episode_id = e.episode_id and f.tenant_id = e.tenant_id;
    delete from episode_end f using ended e where f.episode_id = e.episode_id and f.tenant_id = e.tenant_id;
    delete from feedback where generation_id < until;
    delete from retraction where feedback_id < until;
    delete from trajectory where generation_id < until;
    with removed as (
        delete from payload_reference where generation_id < until returning tenant_id, digest
    )
    insert into payload_unreferenced (tenant_id, digest)
    select distinct tenant_id, digest from removed r
    where not exists (select from payload_reference p
                      where p.digest = r.digest and p.tenant_id = r.tenant_id and p.generation_id >= until)
    on conflict do nothing;
    -- A day later than needed: an event is received after it happened, up to the skew of clocks.
    delete from event_key where received_at < until_at - interval '1 day';

    insert into generation_horizon (until_id) values (until)
    on conflict (one) do update set until_id = greatest(generation_horizon.until_id, excluded.until_id);
    -- Last, for this lock stops everybody else.
    execute format('drop table if exists %I', partition_name);
    delete from generation where id < until;
    return gone;
end
$$;
