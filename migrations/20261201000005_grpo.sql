-- GRPO runs that compare the rewards of several graders one by one, and GRPO runs that come again.
--
-- Cost on an existing database: adding an empty column takes milliseconds; no row is read or rewritten.

-- What a `multi` grader computed the reward from: an object of its graders' rewards, by their names. Null: it had no such grader.
alter table rollout add column reward_parts jsonb;

-- The next occurrence of a run gets a copy of its tasks. Adds to what `grant_database_rights` grants, whatever else that is by now.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(before, '[''control'', ''insert'', ''task, policy, tenant''],',
        '[''control'', ''insert'', ''task, policy, tenant''],
        [''train'', ''insert'', ''task''],');
begin
    if after = before then
        raise exception 'grant_database_rights does not name what control may insert';
    end if;
    execute after;
end
$$;

select grant_database_rights();
