-- shadow: before the first user, replicas answer some of champion's requests a second time with the canary, and nobody sees it.
-- A column that is null in all rows so far, and one state more, so nothing is rewritten.

-- Of the alias `canary`: the share of champion's requests that replicas answer a second time with it. Null: none.
alter table assignment add column shadow double precision;
alter table assignment add constraint assignment_shadow
    check (shadow is null or (alias = 'canary' and share is null and shadow > 0 and shadow <= 1));

alter table canary drop constraint canary_state;
alter table canary add constraint canary_state
    check (state in ('proposed', 'gated', 'shadow', 'canary', 'paused', 'held', 'watched', 'champion', 'retired', 'aborted', 'rolled_back'));

-- Why an answer is not trained on says whether its user left or its engine failed; the group of an unseen answer is the answer that
-- it repeats.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(before, 'finish_reason, finished_at, declined,', 'finish_reason, finished_at, untrainable, group_id, declined,');
begin
    if after = before then
        raise exception 'grant_database_rights does not name what control may read';
    end if;
    execute after;
end
$$;

select grant_database_rights();

-- At most one is under way, also in the new state.
drop index canary_under_way;
create unique index canary_under_way on canary (policy) where state in ('gated', 'shadow', 'canary', 'paused', 'held', 'watched');
