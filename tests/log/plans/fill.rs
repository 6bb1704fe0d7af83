//! Rows for tests with large tables: eight weeks of traffic up to now, ordered by time. The head has
//! sampled only the newest rows.

use sqlx::{AssertSqlSafe, PgPool};

use super::{COHORT, OPEN, QUEUED, RUN};

/// Generations and what became of them.
const HISTORY: &[&str] = &[
    "create function at(n bigint) returns timestamptz language sql immutable as
     $$ select timestamptz '{now}' - interval '56 days' * (({rows} - n)::float8 / {rows}) $$",
    "create function nth(n bigint) returns uuid language sql immutable as
     $$ select (left(first_generation_id(at(n))::text, 14) || '7' || substr(md5(n::text), 1, 3) || '-8' || substr(md5(n::text), 4, 3)
                || '-' || substr(md5(n::text), 7, 12))::uuid $$",
    "select create_generation_partition('generation_' || to_char(monday, 'IYYY\"w\"IW'), first_generation_id(monday),
                                        first_generation_id(monday + interval '7 days')),
            create_trajectory_partition('trajectory_' || to_char(monday, 'IYYY\"w\"IW'), first_generation_id(monday),
                                        first_generation_id(monday + interval '7 days'))
     from generate_series(date_trunc('week', timestamptz '{now}' at time zone 'utc') - interval '9 weeks',
                          date_trunc('week', timestamptz '{now}' at time zone 'utc'), interval '1 week') as week (local),
          lateral (select local at time zone 'utc' as monday) m",
    "insert into policy (name, tenant_id) values ('demo', 'default')",
    "insert into run (id, kind, policy, line, status, config) values ('{run}', 'realtime', 'demo', 'realtime', 'running', '{}')",
    "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                             episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                             finish_reason, declined, sampled_at, parent_id, prompt_prefix_len, sampler, proven)
     select nth(n), 'default', 'demo', v, v, '[]', '\\x00', 'realtime', 'replica-1', 'production', 'completion',
            nth(n / 4 * 4), 'user-' || n % 1000, case when n % 5 < 3 or n > {rows} - {head} then 'champion' else 'base' end, 0.6,
            array[1, 2, 3, 4, 5, 6, 7, 8], array[9, 10, 11, 2], array[-0.5, -0.25, -1, -2], 1, 1, 'stop', false, at(n),
            case when n % 4 > 0 then nth(n - 1) end, case when n % 4 > 0 then 4 else 0 end, '{sampler}', true
     from generate_series(1::bigint, {rows}) n, lateral (select least(n, {rows} - {head}) / {cohort} + 1 as v) version",
    "insert into trajectory (generation_id, surface, reward_definition, reward, censor_code, signal, feedback_at, closed_at)
     select nth(n), 'completion', 1, case when n % 5 < 3 then 0.75 end, case when n % 5 >= 3 then 'no_feedback' end, 'accept',
            at(n) + interval '1 second', at(n) + interval '3 seconds'
     from generate_series(1::bigint, {rows} - {open}) n",
    "insert into sampler (id, public_key, name) values ('{sampler}', decode(repeat('07', 32), 'hex'), 'replica-1')",
    "insert into reward_definition (surface, version, definition) values ('completion', 1, '{}'), ('session', 1, '{}')",
    "insert into assignment (policy, epoch, alias, version, follows, branch, created_at)
     select 'demo', s, 'champion', s, 'realtime', 0, at(s * {cohort}) from generate_series(1::bigint, ({rows} - {head}) / {cohort} + 1) s",
    "insert into open_generation select nth(n), 'completion', at(n) + interval '3 seconds', true
     from generate_series({rows} - {open} + 1, {rows}) n",
    "insert into disposition (generation_id, kind, code, run_id, step, decided_at)
     select nth(n), 'trained', null, '{run}',
            n / {cohort} + 1, at(n)
     from generate_series(1::bigint, {rows} - {head}) n
     where n % 5 < 3",
    "insert into step (run_id, step, version, parent, cohort_digest, metrics, checkpoint_key, run_state_digest, committed_at)
     select '{run}', s, s + 1, s, '\\x00', '{}', 'private/1', sha256(''), at(s * {cohort}) from generate_series(1::bigint, ({rows} - {head}) / {cohort}) s",
    "insert into version (policy, serial, root, parent, line, branch, run_id, step, manifest_key, delta_bytes, image_bytes, created_at)
     select 'demo', s, '\\x00', nullif(s - 1, 0), 'realtime', 0, '{run}', s - 1, 'm', 10, 100, at(s * {cohort})
     from generate_series(1::bigint, ({rows} - {head}) / {cohort} + 1) s",
];

/// What else ingest keeps of them.
const EVENTS: &[&str] = &[
    "insert into feedback (id, tenant_id, generation_id, metric_name, value_bool, given_at, stored_at)
     select overlay(nth(n)::text placing '9' from 20)::uuid, 'default', nth(n), 'accept', n % 3 > 0,
            at(n) + interval '1 second', at(n) + interval '1 second'
     from generate_series(1::bigint, {rows}) n where n % 5 < 3",
    "insert into event_key (tenant_id, source, event_id, kind, digest, received_at)
     select 'default', 'springtide/serve/replica-1', nth(n)::text, 'generation', decode(repeat('00', 32), 'hex'), at(n)
     from generate_series(1::bigint, {rows}) n",
];

/// Texts about every fourth generation, half of them the same, and answers of a judge to those that
/// are not among the newest tenth. Seven more tenants have queues.
const JUDGEMENTS: &[&str] = &[
    "insert into feedback (id, tenant_id, generation_id, metric_name, value_text, given_at, stored_at)
     select overlay(nth(n)::text placing 'a' from 20)::uuid, 'default', nth(n), 'follow_up',
            case when n % 8 = 0 then 'ok' else 'text ' || n end, at(n) + interval '1 second', at(n) + interval '1 second'
     from generate_series(4::bigint, {rows}, 4) n",
    "insert into feedback (id, tenant_id, generation_id, metric_name, value_bool, given_at, stored_at)
     select overlay(nth(n)::text placing 'b' from 20)::uuid, 'default', nth(n), 'dissatisfied', n % 8 = 0,
            at(n) + interval '1 second', at(n) + interval '2 seconds'
     from generate_series(4::bigint, {rows} * 9 / 10, 4) n",
    "insert into judgement (feedback_id, tenant_id, judge, text_digest, created_at, next_at, version, value_bool, votes, answer_id,
                            answered_at)
     select overlay(nth(n)::text placing 'a' from 20)::uuid, 'default', 'sadness',
            case when n % 8 = 0 then '\\x00' else decode(md5(n::text), 'hex') end, at(n),
            case when not is_answered then at(n) end, case when is_answered then '\\x01'::bytea end,
            case when is_answered then n % 8 = 0 end, case when is_answered then array[1.0::float8] end,
            case when is_answered then overlay(nth(n)::text placing 'b' from 20)::uuid end, case when is_answered then at(n) end
     from generate_series(4::bigint, {rows}, 4) n, lateral (select n <= {rows} * 9 / 10 as is_answered) a",
    "insert into judgement (feedback_id, tenant_id, judge, text_digest, created_at, next_at)
     select overlay(nth(n)::text placing 'a' from 20)::uuid, 'tenant-' || n % 7, 'sadness', decode(md5((n % 5)::text), 'hex'), at(n), at(n)
     from generate_series(1::bigint, {rows}, 4) n",
];

/// Sessions of four turns that closed, and as many open ones as there are open generations. What the
/// trajectories were used for.
const SESSIONS: &[&str] = &[
    "update trajectory t set episode_id = g.episode_id, episode_turns = 4 from generation g
     where g.id = t.generation_id and t.generation_id between nth({rows} - 4 * {open}) and nth({rows} - 3 * {open})",
    "insert into open_generation select nth(n), 'session', at(n) + interval '1 hour', true, nth(n / 4 * 4)
     from generate_series({rows} - 3 * {open} + 1, {rows} - 2 * {open}) n",
    "delete from trajectory t using open_generation o where o.generation_id = t.generation_id",
    "delete from disposition d using open_generation o where o.generation_id = d.generation_id",
    "insert into open_episode (tenant_id, episode_id, surface, turn_stored_at, turns, closes_at)
     select 'default', episode_id, 'session', max(closes_at), count(*), max(closes_at) - case when random() < 0.5 then interval '1 hour' else '0' end
     from open_generation where episode_id is not null group by episode_id",
    "insert into trajectory_use (generation_id, run_id, step, purpose, used_at)
     select generation_id, run_id, step, 'trained', decided_at from disposition",
];

/// Every table, on the newest schema.
pub async fn fill(pool: &PgPool, rows: i64) {
    for statements in [HISTORY, EVENTS, JUDGEMENTS, SESSIONS, &["analyze"]] {
        execute(pool, statements, rows).await;
    }
}

async fn execute(pool: &PgPool, statements: &[&str], rows: i64) {
    let now = time::OffsetDateTime::now_utc().unix_timestamp();
    for statement in statements {
        let statement = statement
            .replace("timestamptz '{now}'", &format!("to_timestamp({now})"))
            .replace("{rows}", &rows.to_string())
            .replace("{open}", &OPEN.to_string())
            .replace("{head}", &(OPEN + QUEUED).to_string())
            .replace("{cohort}", &COHORT.to_string())
            .replace("{run}", &RUN.to_string())
            .replace("{sampler}", &"07".repeat(32));
        sqlx::raw_sql(AssertSqlSafe(statement.clone()))
            .execute(pool)
            .await
            .unwrap_or_else(|error| panic!("{error}: {statement}"));
    }
}
