-- What users typed, in the realtime run: only of keys that may teach. Written by the crate `ingest`.
alter table feedback
    add column teaches boolean not null default false;  -- its key had the scope `teach`

-- The newest demonstration of a key that may teach about each of these generations that is not retracted. As
-- `demonstrations`, with the owner's rights, and of the newest 256 of such keys.
create function taught(ids uuid[]) returns table (id uuid, demonstration text)
language sql stable as $$
    select g.id, said.value_text
    from unnest(ids) asked (id)
    join generation g on g.id = asked.id
    cross join lateral (
        select f.value_text
        from (select * from feedback about
              where about.generation_id = g.id and about.tenant_id = g.tenant_id and about.metric_name = 'demonstration'
                and about.teaches
              order by about.given_at desc, about.id desc
              limit 256) f
        where f.value_text is not null
          and not exists (select from retraction r where r.feedback_id = f.id and r.tenant_id = f.tenant_id)
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
