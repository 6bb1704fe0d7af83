-- which versions are good and which are bad: what canaries and people found out; and who is told of decisions. New tables,
-- and columns that are null or have a constant default, so nothing is rewritten.

-- Written by the crate `serving` alone. Append-only: the newest judgment of a version counts. A version without one counts as its
-- nearest judged ancestor does, because it was trained on top of it.
create table judgment (
    id          uuid not null default uuidv7(),
    policy      text not null,
    version     bigint not null,
    verdict     text not null,                          -- release::judgment::Verdict
    canary_id   uuid references canary (id),            -- whose evidence it is; null: a person's word
    actor       text not null,                          -- the API key's label, or 'release': the release loop
    reason      text not null,
    at          timestamptz not null default clock_timestamp(),
    constraint judgment_pkey primary key (id),
    constraint judgment_verdict check (verdict in ('good', 'bad'))
);
create index judgment_by_version on judgment (policy, version, id);

-- The judgments that count.
create view version_judgment as
    select distinct on (policy, version) id, policy, version, verdict, canary_id, actor, reason, at
    from judgment
    order by policy, version, id desc;

-- Of strategy.evaluation: the runs that the gate waits for, of the version and of champion.
alter table canary add column evaluations uuid[] not null default '{}';

-- Of the alias `canary`: the clusters whose replicas give users its version. Null: all.
alter table assignment add column clusters text[];
alter table assignment add constraint assignment_clusters check (clusters is null or (share is not null and cardinality(clusters) > 0));

-- How far each receiver of decisions has got. Decisions are those in `canary_transition` and `transition`.
create table webhook (
    policy      text not null,
    name        text not null,                          -- [[release.webhook]] name
    sent_until  uuid not null,                          -- id of the last decision that it has acknowledged, or that was given up
    failures    integer not null default 0,             -- attempts in a row that failed
    next_at     timestamptz not null default clock_timestamp(),
    last_error  text,                                   -- of the last attempt; null: it succeeded
    updated_at  timestamptz not null default clock_timestamp(),
    constraint webhook_pkey primary key (policy, name)
);

-- Its reader looks for the few moves that people asked for.
create index release_by_request on release (policy, id) where kind in ('promote', 'rollback', 'pin');

-- How long an answer took is evidence, too.
do $$
declare
    before text := pg_get_functiondef('grant_database_rights'::regproc);
    after text := replace(
        replace(before, 'user_key, finish_reason, declined,', 'user_key, finish_reason, finished_at, declined,'),
        '[''control'', ''select, insert'', ''canary_transition''],',
        '[''control'', ''select, insert'', ''canary_transition''],
        [''control'', ''select, insert'', ''judgment''],
        -- garbage collection keeps what a release may go back to
        [''train'', ''select'', ''canary, version_judgment''],
        [''control'', ''select'', ''version_judgment''],
        [''control'', ''select, insert, update'', ''webhook''],');
begin
    if position('finish_reason, finished_at' in after) = 0 or position('judgment' in after) = 0 then
        raise exception 'grant_database_rights does not name what control may read and insert';
    end if;
    execute after;
end
$$;

select grant_database_rights();
