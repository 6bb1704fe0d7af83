-- demonstrations: what users wrote instead of an answer, for supervised runs over a dataset.
--
-- Cost on an existing database: a new function. Nothing is rewritten and no table is read.

-- The newest demonstration about each of these generations that was stored before a moment and is not taken back. It counts even
-- if the trajectory had closed: it says what to write, and not what the answer earned. Null: only whether there is one is asked.
-- The newest 256 of a generation are looked at, because anyone may log any number.
--
-- `train` may read no feedback, so it runs with the owner's rights, and shows what tenants logged that consent to the policy.
create function demonstrations(ids uuid[], stored_before timestamptz, with_texts boolean)
returns table (id uuid, demonstration text)
language sql stable as $$
    select g.id, case when with_texts then said.value_text end
    from unnest(ids) asked (id)
    join generation g on g.id = asked.id
    cross join lateral (
        select f.value_text
        from (select * from feedback about
              where about.generation_id = g.id and about.tenant_id = g.tenant_id and about.metric_name = 'demonstration'
              order by about.given_at desc, about.id desc
              limit 256) f
        where f.value_text is not null and f.stored_at < stored_before
          and not exists (select from retraction r where r.feedback_id = f.id and r.tenant_id = f.tenant_id)
        order by f.given_at desc, f.id desc
        limit 1
    ) said
    where g.tenant_id = any ((select consenting_tenants(g.policy))::text[])
$$;

do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(before,
        'answer_figures(uuid[])
            to springtide_train',
        'answer_figures(uuid[]), demonstrations(uuid[], timestamptz, boolean)
            to springtide_train');
begin
    alter function demonstrations(uuid[], timestamptz, boolean) security definer;
    execute format('alter function demonstrations(uuid[], timestamptz, boolean) set search_path = %I, pg_temp', current_schema());
    revoke execute on function demonstrations(uuid[], timestamptz, boolean) from public;
    if after = before then
        raise exception 'grant_database_rights does not name what train may call';
    end if;
    execute after;
end
$$;

select grant_database_rights();
