-- Prompts and answers for people whose key has the scope `texts`.
--
-- The user of `control` may not read them from `generation`. It calls `generation_texts`, which answers only about
-- generations whose reading the audit has, from the last minute. The calling transaction must have written nothing, so that
-- the row of the audit is committed and stays. As in every read of control, there are only rows of the request's tenant, or
-- of all for administrators.
create function generation_texts(ids uuid[])
returns table (id uuid, in_parts boolean, prompt_ids integer[], token_ids integer[])
language plpgsql as $$
begin
    if pg_current_xact_id_if_assigned() is not null
       or exists (select from unnest(ids) asked (id)
                  where not exists (select from audit a
                                    where a.action = 'texts.read' and a.subject = asked.id::text
                                      and a.at > clock_timestamp() - interval '1 minute')) then
        raise exception 'the audit does not say who reads these texts' using errcode = 'insufficient_privilege';
    end if;
    return query
        select g.id, g.prompt_prefix_len > 0 or g.payload_digest is not null, g.prompt_ids, g.token_ids
        from generation g
        where g.id = any (ids)
          and (g.tenant_id = current_setting('springtide.tenant', true)
               or current_setting('springtide.all_tenants', true) = 'on');
end
$$;

-- Other answers to the prompt of one, of its policy and tenant, from an hour before it until an hour after it: the newest
-- ones among the `looked_at` nearest answers on each side, by a hash of 64 bits, because prompts may be long. Prompts whose context is stored in parts have none. It tells
-- that prompts are equal, and nothing of what they say.
create function answers_to_the_same_prompt(one uuid, looked_at integer, found integer) returns setof uuid
language sql as $$
    with g as (
        select id, policy, tenant_id, prompt_hash, sampled_at
        from generation
        where id = one
          and (tenant_id = current_setting('springtide.tenant', true)
               or current_setting('springtide.all_tenants', true) = 'on')
          and prompt_prefix_len = 0 and payload_digest is null
    ),
    near as (
        select n.* from g cross join lateral (
            select id, prompt_hash, prompt_prefix_len, payload_digest
            from generation
            where policy = g.policy and tenant_id = g.tenant_id
              and id < g.id and id >= first_generation_id(g.sampled_at - interval '1 hour')
            order by id desc limit looked_at
        ) n
        union all
        select n.* from g cross join lateral (
            select id, prompt_hash, prompt_prefix_len, payload_digest
            from generation
            where policy = g.policy and tenant_id = g.tenant_id
              and id > g.id and id < first_generation_id(g.sampled_at + interval '1 hour')
            order by id limit looked_at
        ) n
    )
    select near.id
    from near, g
    where near.prompt_prefix_len = 0 and near.payload_digest is null and near.prompt_hash = g.prompt_hash
    order by near.id desc
    limit found
$$;

-- These run with the owner's rights. Adds to what `grant_database_rights` grants, whatever else that is by now.
do $$
declare
    signature text;
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(before, 'next_dataset_version(text, text)
            to springtide_control',
        'next_dataset_version(text, text),
            generation_texts(uuid[]), answers_to_the_same_prompt(uuid, integer, integer)
            to springtide_control');
begin
    foreach signature in array array['generation_texts(uuid[])', 'answers_to_the_same_prompt(uuid, integer, integer)'] loop
        execute format('alter function %s security definer', signature);
        execute format('alter function %s set search_path = %I, pg_temp', signature, current_schema());
        execute format('revoke execute on function %s from public', signature);
    end loop;
    if position('generation_texts' in after) = 0 then
        raise exception 'grant_database_rights does not name what control may call';
    end if;
    execute after;
end
$$;

select grant_database_rights();
