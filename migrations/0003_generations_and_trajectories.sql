-- Generations, feedback about them, and the trajectories that they become. Written by
-- the crate `ingest`.

-- One sampled completion (one choice). Partitioned by its UUIDv7, that is, by week of sampling.
create table generation (
    -- UUIDv7; its first 48 bits are the unix time in milliseconds.
    id                  uuid not null,
    tenant_id           text not null,
    policy              text not null,
    version             bigint not null,   -- serial of the version that sampled the LAST token
    -- Serial of the oldest version of any token: staleness starts there.
    version_oldest      bigint not null,
    version_spans       jsonb not null,    -- [[version, token count], …] in token order
    root                bytea not null,    -- root digest of `version`
    line                text not null,
    replica             text not null,
    purpose             text not null,
    run_id              uuid,              -- rollouts and evaluations: the run that asked
    task_id             text,
    group_id            text,
    surface             text not null,
    episode_id          uuid not null,
    -- Context of the episode; a summary opens the next.
    segment             integer not null default 0,
    turn                integer not null default 0,
    parent_id           uuid,              -- generation whose prompt and tokens this prompt extends
    user_key            text not null,     -- the caller's opaque key of the user; never a name
    arm                 text not null,     -- alias that answered, such as 'champion'
    arm_probability     real not null,     -- probability with which this user was put in that arm
    -- Tokens shared with the parent, not in prompt_ids.
    prompt_prefix_len   integer not null default 0,
    prompt_prefix_hash  bytea,             -- BLAKE3 of the shared prefix, as u32 little-endian ids
    prompt_ids          integer[] not null,  -- prompt token ids after the shared prefix
    -- Tells whether two prompts are equal without reading them.
    prompt_hash         bigint not null generated always as (hash_array_extended(prompt_ids, 0)) stored,
    token_ids           integer[] not null,  -- sampled token ids, with the stop token
    -- Nats: log-probability of each sampled token under the distribution that was sampled from.
    logprobs            real[] not null,
    train_mask          boolean[],         -- null: every sampled token is trained on
    -- BLAKE3 of a payload in the object store (long contexts).
    payload_digest      bytea,
    temperature         real not null,
    top_p               real not null,
    seed                bigint,
    finish_reason       text not null,
    declined            boolean not null,  -- the policy chose to show nothing
    shown               boolean,           -- null: the surface did not say
    consent             boolean not null default true,  -- false: logged, never trained on
    sampled_at          timestamptz not null,  -- event time: that of the UUIDv7
    stored_at           timestamptz not null default now(),
    -- A policy that may decline can stop answering, and then gets no feedback. So for a small share
    -- of an arm's requests the sampler forbids the decline token. Importance weights need what it
    -- decided. The log-probabilities are then of the distribution without that token.
    decline_suppressed  boolean not null default false,
    exploration_share   real,              -- probability of suppressing; null: no draw was made
    -- Event time at which the last token was sampled. The horizon starts here, or at `sampled_at`
    -- where that is later, or where this is null.
    finished_at         timestamptz,
    -- What else shaped the distribution: top-k, min-p, penalties, logit bias, and how many ids
    -- could be drawn at each token. Few generations have any of it, and no query reads one field.
    -- Null: nothing.
    sampling            jsonb,
    -- The proof as it was logged. The trainer verifies it. Null: unproven, never trained on.
    sampler             text,              -- id of the key that signed
    -- Ed25519, 64 bytes, over what `signed_bytes` of an event gives.
    signature           bytea,
    unsigned_digest     bytea,             -- BLAKE3 of the body without its proof
    -- Whether the sink could verify the signature. True: it was that of a sampler registered for
    -- the replica and policy, neither revoked nor expired. False: it was not. Null: not checked,
    -- because it has no proof or its sampler was not registered yet. The trainer verifies it again.
    proven              boolean,
    -- Why it cannot be trained on whatever its reward, as its sampler said under its signature:
    -- such as an engine that returned no token ids, or a grammar that forced tokens. Lower-case
    -- letters, digits and underscores; the trainer drops it with this code. Null: it may be trained
    -- on.
    untrainable         text,
    -- The engine that computed it, such as 'vllm'. Its log-probabilities differ from the trainer's
    -- by rounding, so the trainer judges and corrects them in another way. Null: our own.
    engine              text,
    constraint generation_pkey primary key (id),
    constraint generation_purpose check (purpose in ('production', 'rollout', 'evaluation')),
    constraint generation_lengths check (cardinality(token_ids) = cardinality(logprobs)),
    constraint generation_exploration check (not decline_suppressed or (exploration_share is not null and not declined))
) partition by range (id);

-- Rows whose week has no partition yet. Ingest creates partitions ahead of time.
create table generation_default partition of generation default;

create index generation_by_version on generation (policy, version, id);
-- To find rollouts about which nothing is decided.
create index generation_rollout on generation (run_id, id) where purpose = 'rollout';
-- The newest generations of an episode, which may have any number.
create index generation_by_episode on generation (episode_id, id);
-- Children of a generation that need its context.
create index generation_by_parent on generation (parent_id) where prompt_prefix_len > 0;
-- The newest answers of a surface, however many others there are: how long its answers take.
create index generation_answer on generation (policy, arm, surface, id) where proven and purpose = 'production';
-- What was stored lately. Rows of one transaction have the same time, so the index is small.
create index generation_by_stored_at on generation (stored_at);

-- The smallest UUIDv7 of a moment's millisecond: `sampled_at >= at` implies `id >=
-- first_generation_id(at)`, so a query by time can use partitions and the primary key. Immutable,
-- because the epoch of a moment depends on no time zone.
create function first_generation_id(at timestamptz) returns uuid
language sql immutable parallel safe as $$
    select (lpad(to_hex(floor(extract(epoch from greatest(at, 'epoch')) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- The number of sampled tokens in a generation's `version_spans`.
create function sampled_tokens(version_spans jsonb) returns bigint
language sql immutable as $$
    select coalesce(sum(case when jsonb_typeof(span -> 1) = 'number' then (span ->> 1)::numeric end), 0)::bigint
    from jsonb_path_query(version_spans, '$[*]') span
$$;

-- Generations that wait for their horizon. One transaction adds the row with the generation, and
-- one deletes it with the trajectory.
create table open_generation (
    generation_id  uuid primary key,
    surface        text not null,
    closes_at      timestamptz not null,  -- event time at which the horizon has passed
    -- As in `generation`; only these hold a cohort back.
    proven         boolean not null default false,
    -- Set: the generation is a turn and closes with this episode. `closes_at` is then the end of
    -- its own horizon, which closes nothing. Null: it is a trajectory of its own.
    episode_id     uuid,
    -- It is a turn that its episode did not take. It closes alone, as 'late_turn'.
    stray          boolean not null default false
);
-- The closer walks along this one. Turns may wait for days, so it does not contain them.
create index open_generation_by_closes_at on open_generation (closes_at, generation_id) where episode_id is null;
create index open_generation_by_episode on open_generation (episode_id, generation_id) where episode_id is not null;
-- A surface's cohort ends at its oldest open proven generation. By surface, so that one with a long
-- horizon does not stop the others.
create index open_generation_proven on open_generation (surface, generation_id) where proven;

-- An episode whose turns wait for their reward. Its row appears with its first open turn and goes
-- with their trajectories, in one transaction each. Sinks and closer lock this row, never the rows
-- of its turns (ingest/src/rows/join.rs).
create table open_episode (
    episode_id      uuid not null,
    tenant_id       text not null,
    surface         text not null,         -- of the turn that was stored first
    opened_at       timestamptz not null default now(),  -- when that turn was stored
    turn_stored_at  timestamptz not null,  -- when the last turn was stored
    closes_at       timestamptz not null,  -- when to look whether it is over
    turns           integer not null default 1,  -- how many are open
    -- It takes no more turns: a turn that comes now is a stray. The row then stays for a while
    -- after the episode has closed, so that turns of one that never ends wait for no lock.
    is_full         boolean not null default false,
    constraint open_episode_pkey primary key (episode_id, tenant_id)
);
create index open_episode_by_closes_at on open_episode (closes_at, episode_id);

-- A signal about a generation or an episode. It has no foreign key, because it may arrive before
-- its generation. Ids are unique in their tenant only: others can compute an id that comes from an
-- `Idempotency-Key`. The id is first in the key, because look-ups do not always know the tenant.
create table feedback (
    id             uuid not null,         -- UUIDv7
    tenant_id      text not null,
    generation_id  uuid,
    episode_id     uuid,
    metric_name    text not null,
    value_bool     boolean,
    value_float    double precision,
    value_text     text,                  -- comment, demonstration
    tags           jsonb not null default '{}',
    given_at       timestamptz not null,  -- event time
    stored_at      timestamptz not null default now(),
    -- Its trajectory had closed: kept, counted, not used.
    late           boolean not null default false,
    orphaned_at    timestamptz,           -- its generation never came; a copy went to the DLQ
    constraint feedback_pkey primary key (id, tenant_id),
    constraint feedback_one_target check ((generation_id is null) <> (episode_id is null)),
    constraint feedback_one_value check (num_nonnulls(value_bool, value_float, value_text) = 1)
);
-- The first signals of a metric about a target, without reading its other feedback.
create index feedback_by_generation_metric on feedback (generation_id, tenant_id, metric_name, given_at, id)
    where generation_id is not null;
create index feedback_by_episode_metric on feedback (episode_id, tenant_id, metric_name, given_at, id)
    where episode_id is not null;
-- The search for orphans moves along it.
create index feedback_by_stored_at on feedback (stored_at);

-- Takes a feedback back from `given_at` on. A trajectory that closes before keeps it; one that
-- closes then or later is scored without it. It has no foreign key: it may arrive before its
-- feedback, and then waits for it. Ids as in `feedback`.
create table retraction (
    id           uuid not null,         -- UUIDv7
    tenant_id    text not null,
    feedback_id  uuid not null,
    reason       text not null,         -- for people; may be empty
    given_at     timestamptz not null,  -- event time
    stored_at    timestamptz not null default now(),
    -- Its trajectory had closed: kept, counted, not used.
    late         boolean not null default false,
    constraint retraction_pkey primary key (id, tenant_id)
);
create index retraction_by_feedback on retraction (feedback_id);
create index retraction_by_stored_at on retraction (stored_at);     -- retention deletes by age

-- Nothing more will come for an episode. The earliest end counts.
create table episode_end (
    tenant_id   text not null,
    episode_id  uuid not null,
    ended_at    timestamptz not null,  -- event time
    stored_at   timestamptz not null default now(),
    constraint episode_end_pkey primary key (tenant_id, episode_id)
);
create index episode_end_by_stored_at on episode_end (stored_at);   -- retention deletes by age

-- One text of a feedback event, and what one judge says about it. A judge is a model behind an
-- endpoint that scores what users write (`[[ingest.judge]]`). The row appears in the transaction
-- that stores the feedback, so no text is forgotten. The table is the judge's queue, the record of
-- where an answer comes from, and the cache: each version of a judge is asked once about a tenant's
-- text.
create table judgement (
    feedback_id  uuid not null,       -- the text
    tenant_id    text not null,
    judge        text not null,       -- its name in the configuration
    text_digest  bytea not null,      -- BLAKE3 of the text
    created_at   timestamptz not null default now(),
    attempts     integer not null default 0,  -- that failed
    -- When to look at it again; null: nothing is left to do.
    next_at      timestamptz default now(),
    taken_until  timestamptz,         -- a process is asking about it until then
    -- Digest of all that determines the answer; null: not answered.
    version      bytea,
    value_bool   boolean,             -- the answer
    value_float  double precision,
    votes        double precision[],  -- one answer per time it was asked; a boolean is 0 or 1
    answer_id    uuid,                -- id of the feedback event that the answer becomes
    answered_at  timestamptz,
    error        text,                -- code, if it was given up; null for an answer
    reason       text,                -- of the latest failure, for people; never user text
    taken_by     uuid,                -- the process that works on it until `taken_until`
    constraint judgement_pkey primary key (feedback_id, tenant_id, judge),
    constraint judgement_answer check (
        num_nonnulls(value_bool, value_float) = (answered_at is not null)::int
        and num_nonnulls(version, votes, answer_id, answered_at) in (0, 4)
        and (error is null or answered_at is null)
    )
);
-- The queue, by tenant, because tenants get equal shares.
create index judgement_by_next_at on judgement (judge, tenant_id, next_at) where next_at is not null;
-- Whether a process is asking about a text, and which copies of it wait for the same answer. Many
-- users may write the same text ("ok", "thanks").
create index judgement_queued on judgement (judge, tenant_id, text_digest, taken_until) where next_at is not null;
-- The cache: any answer of a version.
create index judgement_answered on judgement (tenant_id, judge, text_digest, version) where answer_id is not null;
-- A retraction of the text takes the answer back.
create index judgement_by_answer on judgement (answer_id) where answer_id is not null;

-- How a surface turns signals into a reward. A changed definition is a new version; old rows stay.
create table reward_definition (
    surface     text not null,
    version     integer not null,
    definition  jsonb not null,  -- ingest::reward::Definition
    created_at  timestamptz not null default now(),
    constraint reward_definition_pkey primary key (surface, version)
);

-- A field of a document if it is a number, else null.
create function number_of(document jsonb, field text) returns double precision
language sql immutable parallel safe as $$
    select case jsonb_typeof(document -> field) when 'number' then (document ->> field)::double precision end
$$;

-- The bounds of the rewards that a definition gives (`reward_min`, `reward_max`). Without bounds
-- they are −1 and 1, widened by its own rewards of an accept, a reject and a decline.
create function reward_lowest(definition jsonb) returns double precision
language sql immutable parallel safe as $$
    select coalesce(number_of(definition, 'reward_min'),
                    least(-1, number_of(definition, 'accept'), number_of(definition, 'reject'), number_of(definition, 'decline')))
$$;
create function reward_highest(definition jsonb) returns double precision
language sql immutable parallel safe as $$
    select coalesce(number_of(definition, 'reward_max'),
                    greatest(1, number_of(definition, 'accept'), number_of(definition, 'reject'), number_of(definition, 'decline')))
$$;

-- Whether a reward lies within the bounds of the definition that gave it. The trainer drops others,
-- because one of them could decide a step.
create function reward_in_bounds(reward double precision, definition jsonb) returns boolean
language sql immutable parallel safe as $$
    select reward >= reward_lowest(definition) and reward <= reward_highest(definition)
$$;

-- A generation whose horizon has passed: rewarded, or censored with a code. Exactly one per
-- generation. Partitioned like `generation`.
create table trajectory (
    generation_id      uuid not null,
    surface            text not null,
    reward_definition  integer not null,  -- version of the definition that scored it
    reward             double precision,  -- null iff censored
    censor_code        text,              -- null iff rewarded; such as 'no_feedback'
    signal             text,              -- what decided it: 'accept', 'reject', 'decline', …
    feedback_at        timestamptz,       -- event time of the deciding feedback
    closed_at          timestamptz not null default now(),
    -- Event time after which nothing counted: the end of the horizon, or what ended it sooner. With
    -- it, the trajectory can be scored again as another definition would have.
    closes_at          timestamptz,
    -- Null: the generation is the trajectory. Set: the trajectory is this episode of the
    -- generation's tenant. One transaction writes rows for all of its turns, with the same reward,
    -- censor code, signal, closes_at and closed_at. A turn that came after its episode had closed
    -- has null and the code 'late_turn'.
    episode_id         uuid,
    -- How many turns the episode had when it closed. With fewer rows, retention has deleted some of
    -- it.
    episode_turns      integer,
    turn_reward        double precision,  -- the turn's own reward; null: it has none
    constraint trajectory_pkey primary key (generation_id),
    constraint trajectory_rewarded_or_censored check ((reward is null) <> (censor_code is null)),
    constraint trajectory_episode check ((episode_id is null) = (episode_turns is null)),
    constraint trajectory_turn_reward check (turn_reward is null or (reward is not null and episode_id is not null))
) partition by range (generation_id);

-- Rows whose week has no partition yet.
create table trajectory_default partition of trajectory default;

-- The turns of an episode, and which of them is the last.
create index trajectory_by_episode on trajectory (episode_id, generation_id) where episode_id is not null;
-- What closed lately. Rows of one transaction have the same time, so the index is small.
create index trajectory_by_closed_at on trajectory (closed_at);

-- A statement that closes generations or moves a line sends a notification on the channel
-- 'springtide_' plus the table's name, so that listeners need not poll. It carries nothing and may
-- be lost: listeners also look now and then without one.
create function notify_of_change() returns trigger
language plpgsql as $$
begin
    perform pg_notify('springtide_' || tg_table_name, '');
    return null;
end
$$;
-- The realtime run waits for these.
create trigger trajectory_notify after insert on trajectory
    for each statement execute function notify_of_change();

-- Whether turns of this episode have closed together. Feedback and turns that come later are late.
create function episode_closed(tenant text, episode uuid) returns boolean
language sql stable as $$
    select exists (
        select from trajectory t
        join generation g on g.id = t.generation_id
        where t.episode_id = episode and g.tenant_id = tenant
    )
$$;

-- Whether feedback about this episode comes too late: some of it has closed, and nothing that is
-- open may use the feedback. A turn that is open after its episode has closed uses none. Of an
-- episode whose generations are trajectories of their own, this looks at the newest 256, because
-- anyone may log any number with one id.
create function episode_feedback_late(tenant text, episode uuid) returns boolean
language sql stable as $$
    select case
        when exists (select from open_episode e where e.episode_id = episode and e.tenant_id = tenant)
             and not episode_closed(tenant, episode) then false
        else (
            select coalesce(bool_or(closed.yes), false) and not coalesce(bool_or(open.yes), false)
            from (select id from generation where episode_id = episode and tenant_id = tenant order by id desc limit 256) g
            -- one by one, or Postgres may read whole tables
            left join lateral (select true as yes from trajectory where generation_id = g.id offset 0) closed on true
            left join lateral (select true as yes from open_generation o
                               where o.generation_id = g.id and o.episode_id is null and not o.stray offset 0) open on true
        )
    end
$$;

-- The answers that say something about a version: a replica sampled them for users, their sampler
-- is proven, and none was forced. Canaries, comparisons and pages count these and no others, with
-- the rights of the caller.
create view answer with (security_invoker = true) as
    select id, tenant_id, policy, version, arm, arm_probability, surface, user_key, sampled_at, finished_at, stored_at, finish_reason,
           declined, untrainable, version_spans,
           -- Whom it counts for. A request without a user has a key of its own, so all of a
           -- tenant's count as one user.
           tenant_id || '/' || case when starts_with(user_key, 'anonymous-') then 'anonymous' else user_key end as person
    from generation
    where purpose = 'production' and proven and not decline_suppressed
      -- the caller moved its end, or chose it among several
      and coalesce(untrainable not in ('steered_end', 'chosen'), true);

-- What became of answers. A reward out of the bounds that training has counts as none, and the
-- answer is `excluded`.
create view answer_reward with (security_invoker = true) as
    select t.generation_id, t.episode_id, t.signal, t.censor_code, t.closed_at,
           case when reward_in_bounds(t.reward, d.definition) then t.reward end as reward,
           t.reward is not null and not reward_in_bounds(t.reward, d.definition) as excluded,
           -- the lowest and the highest that it may be, or might have been
           reward_lowest(d.definition) as lowest,
           reward_highest(d.definition) as highest
    from trajectory t
    left join reward_definition d on d.surface = t.surface and d.version = t.reward_definition;

-- The share of an answer's 4-grams that occurred before in it: 1 - distinct / all (seq-rep-4,
-- Welleck et al. 2020). Of its last 512 tokens, because loops come at the end and long answers must
-- not cost more. Null: fewer than 4 tokens.
create function repeated_share(token_ids integer[]) returns double precision
language sql immutable parallel safe as $$
    select 1 - count(distinct hash_array_extended(answer.t[nth:nth + 3], 0))::double precision / nullif(count(*), 0)
    from (select token_ids[greatest(cardinality(token_ids) - 511, 1):] as t offset 0) answer
    cross join lateral generate_series(1, cardinality(answer.t) - 3) nth
$$;

-- What some answers are like, in numbers; evidence::figure::Figure has the meanings. Null where it
-- does not apply, or is not known before the answer has closed. Feedback about the episode counts
-- for each of its answers; late and retracted feedback does not count. It looks at the first 256
-- events about an answer, and about its episode, in the order of the index (by metric, then time),
-- because anyone may log any number.
--
-- It shows no text and no token. `control` may not read those, and `train` may read no feedback, so
-- it runs with the owner's rights. `control` gets what its request's tenant logged, or everything
-- for administrators. `train` gets what tenants logged that consent to the policy.
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
           case when answer.counts and answer.shown then nullif(cardinality(g.token_ids), 0)::bigint end,
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

-- The newest demonstration about each of these generations that was stored before a moment and is
-- not retracted: what users wrote instead of an answer, for supervised runs over a dataset. It
-- counts even if the trajectory had closed, because it says what to write, not what the answer
-- earned. Null if `with_texts` is false: only whether there is one. It looks at the newest 256 of a
-- generation, because anyone may log any number.
--
-- `train` may read no feedback, so it runs with the owner's rights, and shows what tenants logged
-- that consent to the policy.
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

-- Prompts and answers, for people whose key has the scope `texts`.
--
-- The user of `control` may not read them from `generation`. This answers only about generations
-- whose reading is in the audit, since the last minute. The calling transaction must have written
-- nothing, so that the row of the audit is committed and stays. As in every read of control, there
-- are only rows of the request's tenant, or of all for administrators.
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

-- Other answers to the same prompt, of its policy and tenant, from an hour before it until an hour
-- after it: the newest ones among the `looked_at` nearest answers on each side. It compares a hash
-- of 64 bits, because prompts may be long. Prompts whose context is stored in parts have none. It
-- tells that prompts are equal, and nothing of what they say.
create function answers_to_the_same_prompt(one uuid, looked_at integer, found integer) returns setof uuid
language sql as $$
    with g as (
        select id, policy, tenant_id, prompt_hash, sampled_at
        from generation
        where id = one
          and (tenant_id = current_setting('springtide.tenant', true)
               or current_setting('springtide.all_tenants', true) = 'on')
          and prompt_prefix_len = 0 and payload_digest is null and untrainable is distinct from 'erased'
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
