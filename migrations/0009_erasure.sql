-- Erasing what one user left. Written by these functions, which run with the owner's rights: `control` may ask for an
-- erasure, and sees no text. Rows stay and lose what they say, so that the ledger adds up, and so that a version's
-- lineage stays known.

-- Takes from generations what they say of anybody, with all that refers to them, and from feedback of `said` that is about
-- erased ones. What is left of a generation is when, by which version and how long. Returns what it found.
create function unlink(ids uuid[], said uuid[]) returns jsonb
language plpgsql as $$
declare
    texts bigint;
    payloads bigint;
begin
    -- What was decided stays; the others are not trained on from here on.
    insert into disposition (generation_id, kind) select unnest(ids), 'erased' on conflict do nothing;
    update generation g
    set user_key = 'anonymous-' || g.id, prompt_prefix_len = 0, prompt_prefix_hash = null, prompt_ids = '{}',
        token_ids = '{}', logprobs = '{}', train_mask = null, payload_digest = null, seed = null, sampling = null,
        signature = null, sampler = null, unsigned_digest = null, task_id = null, group_id = null, consent = false,
        untrainable = 'erased'
    where g.id = any (ids);

    with about as materialized (
        select f.id, f.tenant_id
        from generation g join feedback f on f.generation_id = g.id and f.tenant_id = g.tenant_id where g.id = any (ids)
        union
        select f.id, f.tenant_id
        from generation g join feedback f on f.episode_id = g.episode_id and f.tenant_id = g.tenant_id where g.id = any (ids)
        union
        select f.id, f.tenant_id
        from feedback f
        where f.id = any (said)
          and (exists (select from generation g
                       where g.id = f.generation_id and g.tenant_id = f.tenant_id and g.untrainable = 'erased')
               or exists (select from generation g
                          where g.episode_id = f.episode_id and g.tenant_id = f.tenant_id and g.untrainable = 'erased'))
    ),
    blanked as (
        update feedback f set value_text = case when f.value_text is not null then '' end, tags = '{}'
        from about a
        where f.id = a.id and f.tenant_id = a.tenant_id and (f.value_text <> '' or f.tags <> '{}')
        returning f.id
    ),
    -- the digest of a text would tell who knows it that it was written
    unjudged as (
        delete from judgement j using about a where j.feedback_id = a.id and j.tenant_id = a.tenant_id
    ),
    unreasoned as (
        update retraction r set reason = '' from about a
        where r.feedback_id = a.id and r.tenant_id = a.tenant_id and r.reason <> ''
    )
    select count(*) into texts from blanked;

    with gone as (
        delete from payload_reference r where r.generation_id = any (ids) returning r.tenant_id, r.digest
    ),
    unreferenced as (
        insert into payload_unreferenced (tenant_id, digest)
        select distinct g.tenant_id, g.digest from gone g
        where not exists (select from payload_reference p
                          where p.digest = g.digest and p.tenant_id = g.tenant_id and p.generation_id <> all (ids) offset 0)
        on conflict do nothing
    )
    select count(*) into payloads from gone;
    return jsonb_build_object('generations', cardinality(ids), 'feedback', texts, 'payloads', payloads);
end
$$;

-- For the sink, in the transaction that stores events: unlinks those of erased users, and texts about them. `said`: ids of
-- feedback, and of what was retracted.
create function unlink_arrived(generations uuid[], said uuid[]) returns void
language plpgsql as $$
begin
    -- until the sink commits, nobody is registered
    perform pg_advisory_xact_lock_shared(hashtext('register_erasure'));
    if exists (select from erasure) then
        perform unlink(coalesce((select array_agg(g.id)
                                 from generation g
                                 join erasure e on e.tenant_id = g.tenant_id
                                               and e.user_digest = user_digest(g.tenant_id, g.user_key)
                                 where g.id = any (generations)), '{}'), said);
    end if;
end
$$;

-- The first transaction of an erasure: what is stored, or trained on, after it knows of it. It waits for sinks that are
-- storing events; whoever calls it also waits for steps that are being committed. Returns the id, an older one's if the
-- user was erased before.
create function register_erasure(erasure_id uuid, tenant text, digest bytea, actor text) returns uuid
language plpgsql as $$
declare
    registered uuid;
begin
    perform pg_advisory_xact_lock(hashtext('register_erasure'));
    insert into erasure (id, tenant_id, user_digest, requested_by) values (erasure_id, tenant, digest, actor)
    on conflict on constraint erasure_user do update set erased_at = clock_timestamp(), finished = false
    returning id into registered;
    return registered;
end
$$;

-- The second: erases a registered user, whose key is $2 or has the digest $3. Asking again erases what has come since.
-- Returns what was found in all.
create function erase_user(tenant text, key text, digest bytea) returns jsonb
language plpgsql as $$
declare
    erasure_id uuid := (select e.id from erasure e where e.tenant_id = tenant and e.user_digest = digest);
    ids uuid[];
    counted jsonb;
begin
    -- Nobody sums up answers of a canary meanwhile, under the user's key.
    perform pg_advisory_xact_lock(hashtextextended(c.canary_id::text, 0))
    from (select canary_id from canary_sums order by canary_id) c;
    -- A key is compared faster than a digest.
    select coalesce(array_agg(g.id), '{}') into ids
    from generation g
    where g.tenant_id = tenant
      and case when key is null then user_digest(g.tenant_id, g.user_key) = digest else g.user_key = key end;

    counted := unlink(ids, '{}');

    -- A trainer that has leased it is told when it renews its lease or commits; its files are deleted.
    with dropped as (
        update cohort c set state = 'dropped', refusal = 'a user whose trajectories it had was erased'
        where c.state in ('filling', 'full', 'submitted')
          and exists (select from cohort_part p where p.cohort_id = c.id and p.generations && ids)
        returning c.id
    )
    select counted || jsonb_build_object('cohorts', count(*)) into counted from dropped;

    -- One person stays one person, of no name.
    update canary_user c set person = tenant || '/erased-' || erasure_id
    where c.tenant_id = tenant and user_digest(tenant, substr(c.person, length(tenant) + 2)) = digest;
    update canary_closed c set person = tenant || '/erased-' || erasure_id
    where c.tenant_id = tenant and user_digest(tenant, substr(c.person, length(tenant) + 2)) = digest;

    update erasure e
    set receipt = counted || jsonb_build_object(
        'generations', (counted ->> 'generations')::bigint + coalesce((e.receipt ->> 'generations')::bigint, 0),
        'feedback', (counted ->> 'feedback')::bigint + coalesce((e.receipt ->> 'feedback')::bigint, 0),
        'payloads', (counted ->> 'payloads')::bigint + coalesce((e.receipt ->> 'payloads')::bigint, 0),
        'cohorts', (counted ->> 'cohorts')::bigint + coalesce((e.receipt ->> 'cohorts')::bigint, 0),
        'trained', (select coalesce(jsonb_agg(t order by t.policy, t.version), '[]') from (
            select s.policy, s.version from jsonb_to_recordset(coalesce(e.receipt -> 'trained', '[]')) s (policy text, version bigint)
            union
            select r.policy, s.version
            from (select d.run_id, d.step from disposition d where d.kind = 'trained' and d.generation_id = any (ids)
                  union
                  select u.run_id, u.step from trajectory_use u where u.purpose = 'trained' and u.generation_id = any (ids)) used
            join step s on s.run_id = used.run_id and s.step = used.step
            join run r on r.id = s.run_id) t)),
        finished = true
    where e.tenant_id = tenant and e.user_digest = digest
    returning e.receipt || jsonb_build_object('erased_at', extract(epoch from e.erased_at), 'id', e.id) into counted;
    return counted;
end
$$;

-- The versions that a policy has made of these: themselves, and all that continue them.
create function descendants(policy_name text, serials bigint[]) returns setof bigint
language sql stable as $$
    with recursive later as (
        select v.serial from version v where v.policy = policy_name and v.serial = any (serials)
        union
        select v.serial from later l join version v on v.policy = policy_name and v.parent = l.serial
    )
    select serial from later order by serial
$$;
