-- How long answers are is evidence of a canary. `control` reads it as the sum of `version_spans`, and no token: those are users'
-- texts. Nothing is rewritten.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(before, 'user_key, finish_reason, finished_at, declined,',
                          'user_key, finish_reason, finished_at, version_spans, declined,');
begin
    if after = before then
        raise exception 'grant_database_rights does not name what control may read';
    end if;
    execute after;
end
$$;

select grant_database_rights();
