-- What users typed, in the realtime run: only of keys that may teach. Written by the crate `ingest`.
alter table feedback
    add column teacher uuid;  -- the key that sent it, if that had the scope `teach`; nil: no key was needed
-- Written by the crate `runs`.
alter table disposition
    add column typed_tokens integer,  -- learned of what its user typed, in place of what was sampled
    add column teacher uuid;          -- the key that sent what was typed

-- The newest demonstration of a key that may teach about each of these generations, neither retracted nor of a key that
-- is revoked. As `demonstrations`, with the owner's rights, and of the newest 256 of such keys.
create function taught(ids uuid[]) returns table (id uuid, demonstration text, teacher uuid)
language sql stable as $$
    select g.id, said.value_text, said.teacher
    from unnest(ids) asked (id)
    join generation g on g.id = asked.id
    cross join lateral (
        select f.value_text, f.teacher
        from (select * from feedback about
              where about.generation_id = g.id and about.tenant_id = g.tenant_id and about.metric_name = 'demonstration'
                and about.teacher is not null
              order by about.given_at desc, about.id desc
              limit 256) f
        where f.value_text is not null
          and not exists (select from retraction r where r.feedback_id = f.id and r.tenant_id = f.tenant_id)
          and not exists (select from api_key k where k.id = f.teacher and k.revoked_at is not null)
        order by f.given_at desc, f.id desc
        limit 1
    ) said
    where g.tenant_id = any ((select consenting_tenants(g.policy))::text[])
$$;

do $$
begin
    alter function taught(uuid[]) security definer;
    execute format('alter function taught(uuid[]) set search_path = %I, pg_temp', current_schema());
    revoke execute on function taught(uuid[]) from public;
end
$$;

-- As before, but of what was typed its own tokens.
create or replace function trained_share(run uuid, newest integer)
returns table (tenant_id text, user_key text, surface text, trajectories bigint, share double precision,
               tokens bigint, token_share double precision)
language sql stable as $$
    with latest as (
        select d.generation_id, d.step, d.typed_tokens from disposition d
        where d.run_id = run and d.kind = 'trained'
        order by d.step desc
        limit newest
    ),
    of_users as (
        select g.tenant_id, g.user_key, g.surface,
               count(distinct (latest.step, coalesce(t.episode_id, g.id))) as trajectories,
               sum(case when latest.typed_tokens is not null then latest.typed_tokens
                        when g.train_mask is null then cardinality(g.token_ids)
                        else cardinality(array_positions(g.train_mask, true)) end)::bigint as tokens
        from latest
        join generation g on g.id = latest.generation_id
        join trajectory t on t.generation_id = g.id
        group by g.tenant_id, g.user_key, g.surface
    ),
    shares as (
        select o.*, o.trajectories::double precision / sum(o.trajectories) over () as share,
               o.tokens::double precision / greatest(1, sum(o.tokens) over ()) as token_share
        from of_users o
    )
    select s.tenant_id, s.user_key, s.surface, s.trajectories, s.share, s.tokens, s.token_share
    from shares s
    order by greatest(s.share, s.token_share) desc, s.tenant_id, s.user_key, s.surface
$$;

-- What earlier migrations grant, and what came since.
alter function grant_database_rights() rename to grant_database_rights_0012;
create function grant_database_rights() returns void
language plpgsql as $$
begin
    perform grant_database_rights_0012();
    if exists (select from pg_roles where rolname = 'springtide_train') then
        grant execute on function taught(uuid[]) to springtide_train;
    end if;
end
$$;

select grant_database_rights();
