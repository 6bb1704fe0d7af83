-- monitors: what answers are like, and the state of the tests that watch it.
--
-- Cost on an existing database: a new table and new functions. Nothing is rewritten and no table is read.

-- The tests of one run's figures on one surface, written by the crate `trainer` alone. One row is read and written at a time.
create table monitor (
    run_id      uuid not null references run (id),
    surface     text not null,
    last_id     uuid not null,                          -- last generation of the last trajectory that was taken
    state       jsonb not null,                         -- figure → evidence::change::Change
    figures     jsonb not null,                         -- figure → levels, evidence and alarm, for people
    updated_at  timestamptz not null default clock_timestamp(),
    constraint monitor_pkey primary key (run_id, surface)
);

-- The share of an answer's 4-grams that occurred before in it: 1 - distinct / all (seq-rep-4, Welleck et al. 2020). Of its last
-- 512 tokens, because loops come at the end and long answers must not cost more. Null: fewer than 4 tokens.
create function repeated_share(token_ids integer[]) returns double precision
language sql immutable parallel safe as $$
    select 1 - count(distinct hash_array_extended(answer.t[nth:nth + 3], 0))::double precision / nullif(count(*), 0)
    from (select token_ids[greatest(cardinality(token_ids) - 511, 1):] as t offset 0) answer
    cross join lateral generate_series(1, cardinality(answer.t) - 3) nth
$$;

-- What some answers are like, in numbers: evidence::figure::Figure has the meanings. Null where it does not apply, or is not known
-- before the answer has closed. Feedback about the episode counts for each of its answers; what came late or was taken back does not.
-- The first 256 events about an answer, and about its episode, are looked at, because anyone may log any number: in the order of the
-- index, by metric and then time.
--
-- It shows no text and no token. `control` may not read those, and `train` may read no feedback, so it runs with the owner's
-- rights. `control` gets what its request's tenant logged, or everything for administrators. `train` gets what tenants logged that
-- consent to the policy.
create function answer_figures(ids uuid[])
returns table (id uuid, shown boolean, accepted boolean, edited boolean, unanswered boolean, unscored boolean,
               disagreement boolean, tool_failed boolean, length bigint, repetition double precision, entropy double precision)
language sql stable as $$
    select g.id,
           case when answer.counts then answer.shown end,
           case when answer.closed then coalesce(given.yes, false) end,
           case when answer.closed then coalesce(given.edited, false) end,
           case when answer.closed then given.events = 0 end,
           case when answer.closed then t.reward is null end,
           case when answer.closed then coalesce(given.yes, false) and (coalesce(given.no, false) or coalesce(t.reward < 0, false))
                                        or coalesce(given.no, false) and coalesce(t.reward > 0, false) end,
           case when answer.closed then coalesce(given.tool_failed, false) end,
           case when answer.counts and answer.shown then cardinality(g.token_ids)::bigint end,
           case when answer.counts and answer.shown then repeated_share(g.token_ids) end,
           case when answer.counts and answer.shown
                then (select -avg(least(greatest(logprob, -100), 0))
                      from unnest(g.logprobs[greatest(cardinality(g.logprobs) - 511, 1):]) logprob
                      where logprob <> 'NaN') end
    from unnest(ids) asked (id)
    join generation g on g.id = asked.id
    left join lateral (select x.reward, x.censor_code, x.surface, x.reward_definition, x.generation_id
                       from trajectory x where x.generation_id = g.id limit 1) t on true
    left join reward_definition d on d.surface = t.surface and d.version = t.reward_definition
    cross join lateral (
        -- these were never to be scored
        select coalesce(t.censor_code, '') not in ('no_consent', 'evaluation', 'not_shown', 'late_turn') as counts,
               not g.declined and g.shown is distinct from false as shown
    ) judged
    cross join lateral (
        select judged.counts, judged.shown, judged.counts and judged.shown and t.generation_id is not null as closed
    ) answer
    left join lateral (
        select count(*) as events,
               bool_or(f.value_bool and f.metric_name = coalesce(d.definition ->> 'metric', 'accept')) as yes,
               bool_or(not f.value_bool and f.metric_name = coalesce(d.definition ->> 'metric', 'accept')
                       or f.value_float < 0) as no,
               bool_or(f.metric_name = 'demonstration') as edited,
               bool_or(f.value_bool and f.metric_name = 'tool_failed') as tool_failed
        from (
            (select * from feedback about where about.generation_id = g.id and about.tenant_id = g.tenant_id
             order by about.metric_name, about.given_at, about.id limit 256)
            union all
            (select * from feedback about where about.episode_id = g.episode_id and about.tenant_id = g.tenant_id
             order by about.metric_name, about.given_at, about.id limit 256)
        ) f
        where not f.late
          and not exists (select from retraction r where r.feedback_id = f.id and r.tenant_id = f.tenant_id and not r.late)
    ) given on answer.closed
    where case when session_user = 'springtide_train' then g.tenant_id = any ((select consenting_tenants(g.policy))::text[])
               else g.tenant_id = current_setting('springtide.tenant', true)
                    or current_setting('springtide.all_tenants', true) = 'on' end
$$;

do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(replace(replace(replace(before,
        -- figures are compared by surface
        'user_key, finish_reason,', 'user_key, surface, finish_reason,'),
        '[''train'', ''select'', ''canary, version_judgment''],',
        '[''train'', ''select'', ''canary, version_judgment''],
        [''train'', ''select, insert, update'', ''monitor''],
        [''control'', ''select'', ''monitor''],'),
        'generation_texts(uuid[]), answers_to_the_same_prompt',
        'generation_texts(uuid[]), answer_figures(uuid[]), answers_to_the_same_prompt'),
        'dataset_tenants(text)
            to springtide_train',
        'dataset_tenants(text), answer_figures(uuid[])
            to springtide_train');
begin
    alter function answer_figures(uuid[]) security definer;
    execute format('alter function answer_figures(uuid[]) set search_path = %I, pg_temp', current_schema());
    revoke execute on function answer_figures(uuid[]) from public;
    if position('''monitor''' in after) = 0 or position('user_key, surface,' in after) = 0
       or cardinality(string_to_array(after, 'answer_figures(uuid[])')) <> 3 then
        raise exception 'grant_database_rights does not name what control and train may do';
    end if;
    execute after;
end
$$;

select grant_database_rights();
