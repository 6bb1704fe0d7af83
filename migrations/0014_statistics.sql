-- ANALYZE counts every element of an array: of 30,000 generations with 1,050 elements each that took
-- ten times as long as all other columns together. Meanwhile no dead row of any table can be removed,
-- and the closer reads past those of all generations that have closed. No query needs statistics of
-- these columns.
alter table generation
    alter column prompt_ids set statistics 0,
    alter column token_ids set statistics 0,
    alter column logprobs set statistics 0,
    alter column train_mask set statistics 0;

-- As before (0008). A new partition does not inherit these settings.
create or replace function create_generation_partition(name text, from_id uuid, until_id uuid) returns void
language plpgsql as $$
begin
    if to_regclass(quote_ident(name)) is not null then
        return;
    end if;
    perform check_partition_name(name, 'generation');
    perform set_config('lock_timeout', '2s', true);
    perform pg_advisory_xact_lock(hashtext('create_generation_partition'));
    execute format('create table if not exists %I partition of generation for values from (%L) to (%L)', name, from_id, until_id);
    execute format('alter table %I alter column prompt_ids set statistics 0, alter column token_ids set statistics 0, '
                   'alter column logprobs set statistics 0, alter column train_mask set statistics 0', name);
end
$$;

do $$
begin
    alter function create_generation_partition(text, uuid, uuid) security definer;
    execute format('alter function create_generation_partition(text, uuid, uuid) set search_path = %I, pg_temp', current_schema());
end
$$;
