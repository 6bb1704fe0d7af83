-- Retention by tenant and surface: what generations say goes earlier than their weeks. Rows stay and
-- lose their content, as after an erasure, so the ledger adds up. Written by the crate `ingest`.

-- Below which ids generations of a tenant and a surface have no content. What arrives later and lies
-- below is unlinked in the transaction that stores it.
create table content_horizon (
    tenant_id  text not null,  -- empty: of every tenant
    surface    text not null,  -- empty: of every surface
    until_id   uuid not null,  -- it only rises
    walked_id  uuid not null default '00000000-0000-0000-0000-000000000000',  -- stored rows are unlinked below
    constraint content_horizon_pkey primary key (tenant_id, surface)
);

create or replace function unlink_arrived(generations uuid[], said uuid[]) returns void
language plpgsql as $$
begin
    -- until the sink commits, nobody is registered and no horizon rises
    perform pg_advisory_xact_lock_shared(hashtext('register_erasure'));
    if exists (select from erasure) or exists (select from content_horizon) then
        perform unlink(coalesce((select array_agg(g.id)
                                 from generation g
                                 where g.id = any (generations)
                                   and (exists (select from erasure e
                                                where e.tenant_id = g.tenant_id
                                                  and e.user_digest = user_digest(g.tenant_id, g.user_key))
                                        or exists (select from content_horizon h
                                                   where h.tenant_id in ('', g.tenant_id) and h.surface in ('', g.surface)
                                                     and g.id < h.until_id))), '{}'), said);
    end if;
end
$$;

-- Takes the content from generations of a tenant and a surface (empty: of all) that were sampled
-- before a time. Each call does one step in its own transaction: the first raises the horizon, each
-- later one walks over `most` rows of any tenant. Returns whether something is left.
create function forget_content(tenant text, of_surface text, before timestamptz, most integer) returns boolean
language plpgsql as $$
declare
    until uuid := first_generation_id(before);
    horizon content_horizon;
    ids uuid[];
    last_id uuid;
    walked bigint;
begin
    select h.* into horizon from content_horizon h where h.tenant_id = tenant and h.surface = of_surface for update;
    if horizon.until_id is null or horizon.until_id < until then
        -- waits for sinks that are storing events
        perform pg_advisory_xact_lock(hashtext('register_erasure'));
        insert into content_horizon (tenant_id, surface, until_id) values (tenant, of_surface, until)
        on conflict on constraint content_horizon_pkey do update set until_id = excluded.until_id;
        return true;
    end if;

    -- an aggregate of ids: `max` does not know uuids before Postgres 18
    select count(*), (array_agg(s.id order by s.id desc))[1],
           coalesce(array_agg(s.id) filter (where tenant in ('', s.tenant_id) and of_surface in ('', s.surface)
                                              and s.untrainable is distinct from 'erased'), '{}')
    into walked, last_id, ids
    from (select g.id, g.tenant_id, g.surface, g.untrainable
          from generation g
          where g.id >= horizon.walked_id and g.id < horizon.until_id
          order by g.id limit most) s;

    if cardinality(ids) > 0 then
        perform unlink(ids, '{}');
        update cohort c set state = 'dropped', refusal = 'trajectories that it had are past their retention'
        where c.state in ('filling', 'full', 'submitted')
          and exists (select from cohort_part p where p.cohort_id = c.id and p.generations && ids);
    end if;
    update content_horizon h set walked_id = case when walked < most then horizon.until_id else last_id end
    where h.tenant_id = tenant and h.surface = of_surface;
    return walked = most;
end
$$;

do $$
declare
    signature text;
begin
    foreach signature in array array['unlink_arrived(uuid[], uuid[])', 'forget_content(text, text, timestamptz, integer)'] loop
        execute format('alter function %s security definer', signature);
        execute format('alter function %s set search_path = %I, pg_temp', signature, current_schema());
        execute format('revoke execute on function %s from public', signature);
    end loop;
end
$$;

-- What an earlier migration grants, and what came since.
alter function grant_database_rights() rename to grant_database_rights_0010;
create function grant_database_rights() returns void
language plpgsql as $$
begin
    perform grant_database_rights_0010();
    if exists (select from pg_roles where rolname = 'springtide_ingest') then
        grant execute on function forget_content(text, text, timestamptz, integer) to springtide_ingest;
    end if;
end
$$;

select grant_database_rights();
