//! What others log keeps nobody's rows from being read, closed and deleted: rows of another tenant with
//! the same ids, labels that are not true, and floods about one target. The queries run on rows that
//! are written here, without the sink.

use std::time::Duration;

use ::ingest::reward::Definition;
use serde_json::Value;
use sqlx::{PgPool, Row};
use uuid::Uuid;

use fixture::ingest::{Service, options};
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(60);
const RUN: &str =
    "insert into run (id, kind, policy, line, status, config) values ($1, $2, 'demo', $2, 'running', '{}')";

/// A generation of a tenant in an episode.
async fn generation(pool: &PgPool, tenant: &str, episode: Uuid) -> Uuid {
    let id = Uuid::now_v7();
    sqlx::query(
        "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, \
             surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p, \
             finish_reason, declined, proven, sampled_at, finished_at) \
         values ($1, $2, 'demo', 1, 1, '[[1, 1]]', '\\x00', 'realtime', 'replica-1', 'production', 'completion', $3, 'user', \
                 'learner', 1, array[1], array[2], array[-0.5::real], 1, 1, 'stop', false, true, now(), now())",
    )
    .bind(id)
    .bind(tenant)
    .bind(episode)
    .execute(pool)
    .await
    .unwrap();
    id
}

/// Closes a generation with a reward, as its episode if there is one.
async fn close(pool: &PgPool, id: Uuid, episode: Option<Uuid>) {
    sqlx::query(
        "insert into trajectory (generation_id, surface, reward_definition, reward, signal, episode_id, episode_turns) \
         values ($1, 'completion', 1, 0.75, 'accept', $2, case when $2 is not null then 1 end)",
    )
    .bind(id)
    .bind(episode)
    .execute(pool)
    .await
    .unwrap();
}

async fn open(pool: &PgPool, id: Uuid) {
    let open = "insert into open_generation (generation_id, surface, closes_at) values ($1, 'completion', now() + interval '1 h')";
    sqlx::query(open).bind(id).execute(pool).await.unwrap();
}

/// As many booleans about a generation.
async fn feedback(pool: &PgPool, tenant: &str, id: Uuid, metric: &str, count: i32) {
    sqlx::query(
        "insert into feedback (id, tenant_id, generation_id, metric_name, value_bool, given_at) \
         select uuidv7(), $1, $2, $3, true, now() from generate_series(1, $4)",
    )
    .bind(tenant)
    .bind(id)
    .bind(metric)
    .bind(count)
    .execute(pool)
    .await
    .unwrap();
}

async fn define(pool: &PgPool, definition: &Value) {
    let define = "insert into reward_definition (surface, version, definition) values ('completion', 1, $1) \
                  on conflict on constraint reward_definition_pkey do update set definition = $1";
    sqlx::query(define).bind(definition).execute(pool).await.unwrap();
}

/// Of the policy `demo`.
async fn own(pool: &PgPool) {
    sqlx::query("insert into tenant (id) values ('default'), ('other') on conflict do nothing")
        .execute(pool)
        .await
        .unwrap();
    sqlx::query("insert into policy (name, tenant_id) values ('demo', 'default') on conflict do nothing")
        .execute(pool)
        .await
        .unwrap();
}

async fn needed(pool: &PgPool) -> Option<String> {
    let needed = "select generations_needed('ffffffff-ffff-ffff-ffff-ffffffffffff')";
    sqlx::query_scalar(needed).fetch_one(pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn figures_are_those_of_the_tenants_own_rows() {
    let stack = Stack::start("foreign-figures").await;
    let pool = &stack.pool;
    define(pool, &serde_json::json!({"metric": "accept"})).await;
    let accepted = async |id: Uuid| -> Option<bool> {
        let mut transaction = edge::database::begin(pool).await.unwrap();
        sqlx::raw_sql("set local springtide.all_tenants = 'on'")
            .execute(&mut *transaction)
            .await
            .unwrap();
        sqlx::query_scalar("select accepted from answer_figures(array[$1])")
            .bind(id)
            .fetch_one(&mut *transaction)
            .await
            .unwrap()
    };
    let own = generation(pool, "default", Uuid::now_v7()).await;
    close(pool, own, None).await;
    feedback(pool, "default", own, "accept", 1).await;
    sqlx::query(
        "insert into retraction (id, tenant_id, feedback_id, reason, given_at) \
         select uuidv7(), 'other', id, '', now() from feedback where generation_id = $1",
    )
    .bind(own)
    .execute(pool)
    .await
    .unwrap();
    assert_eq!(accepted(own).await, Some(true), "another tenant takes nothing back");
    // What many events say of another metric hides no verdict.
    let flooded = generation(pool, "default", Uuid::now_v7()).await;
    close(pool, flooded, None).await;
    feedback(pool, "default", flooded, "tool_failed", 300).await;
    feedback(pool, "default", flooded, "accept", 1).await;
    assert_eq!(accepted(flooded).await, Some(true));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_of_another_tenant_in_an_episode_of_the_same_id_hides_it_from_no_monitor() {
    let stack = Stack::start("foreign-monitor").await;
    let pool = &stack.pool;
    own(pool).await;
    let episode = Uuid::now_v7();
    let own = generation(pool, "default", episode).await;
    close(pool, own, Some(episode)).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let foreign = generation(pool, "other", episode).await;
    close(pool, foreign, Some(episode)).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let next = sqlx::query(include_str!("../../trainer/runs/src/monitors/next.sql"))
        .bind("demo")
        .bind("learner")
        .bind(Vec::<String>::new())
        .bind("completion")
        .bind(Uuid::nil())
        .bind(0.0_f64)
        .bind(10_i64);
    let next = next.fetch_all(pool).await.unwrap();
    let ids: Vec<Uuid> = next.iter().map(|row| row.get(0)).collect();
    assert_eq!(ids, [own]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_of_which_its_run_knows_nothing_keeps_no_week_and_is_dropped() {
    let stack = Stack::start("foreign-rollout").await;
    let pool = &stack.pool;
    own(pool).await;
    let (realtime, grpo) = (Uuid::now_v7(), Uuid::now_v7());
    for (run, kind) in [(realtime, "realtime"), (grpo, "grpo")] {
        sqlx::query(RUN).bind(run).bind(kind).execute(pool).await.unwrap();
    }
    let episodes = [Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7()];
    let mut ids = Vec::new();
    for (run, episode) in [realtime, grpo, grpo].into_iter().zip(episodes) {
        let id = generation(pool, "default", episode).await;
        close(pool, id, None).await;
        let label = "update generation set purpose = 'rollout', run_id = $2 where id = $1";
        sqlx::query(label).bind(id).bind(run).execute(pool).await.unwrap();
        ids.push(id);
    }
    assert_eq!(needed(pool).await, None);
    sqlx::query("insert into task (run_id, id, prompt, answer) values ($1, 'task', '', '')")
        .bind(grpo)
        .execute(pool)
        .await
        .unwrap();
    sqlx::query("insert into rollout (id, run_id, task_id, group_id, draw) values ($1, $2, 'task', $1, 0)")
        .bind(episodes[2])
        .bind(grpo)
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(needed(pool).await.as_deref(), Some("queued"));
    sqlx::query(include_str!("../../trainer/runs/src/select/abandoned.sql"))
        .bind("demo")
        .bind(100_i64)
        .execute(pool)
        .await
        .unwrap();
    let dropped: Vec<(Uuid, String)> =
        sqlx::query_as("select generation_id, code from disposition order by generation_id")
            .fetch_all(pool)
            .await
            .unwrap();
    let unknown = |id| (id, "unknown_run".to_owned());
    assert_eq!(dropped, [unknown(ids[0]), unknown(ids[1])]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_consent_brings_nothing_back_into_datasets() {
    let stack = Stack::start("foreign-consent").await;
    let pool = &stack.pool;
    own(pool).await;
    let early = generation(pool, "other", Uuid::now_v7()).await;
    close(pool, early, None).await;
    sqlx::query("insert into tenant_consent (policy, tenant_id, given_by) values ('demo', 'other', 'test')")
        .execute(pool)
        .await
        .unwrap();
    let consented = generation(pool, "other", Uuid::now_v7()).await;
    close(pool, consented, None).await;
    let own = generation(pool, "default", Uuid::now_v7()).await;
    close(pool, own, None).await;
    let query = serde_json::json!({"closed_before": "9999-01-01T00:00:00Z", "limit": 10});
    let members: Vec<Vec<Uuid>> = sqlx::query_scalar("select generation_ids from dataset_members('demo', $1, true)")
        .bind(query)
        .fetch_all(pool)
        .await
        .unwrap();
    assert_eq!(members, [[consented], [own]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_of_another_tenant_holds_no_episode_of_the_same_id() {
    let stack = Stack::start("foreign-hold").await;
    let pool = &stack.pool;
    let episode = Uuid::now_v7();
    sqlx::query(
        "insert into open_episode (tenant_id, episode_id, surface, turn_stored_at, closes_at) \
         values ('default', $1, 'session', now(), now())",
    )
    .bind(episode)
    .execute(pool)
    .await
    .unwrap();
    let held = async |tenant: &str| {
        let mut sink = edge::database::begin(pool).await.unwrap();
        let none = || (Vec::<String>::new(), Vec::<Uuid>::new());
        sqlx::query(include_str!("../../ingest/src/rows/join/hold_episodes.sql"))
            .bind(none().0)
            .bind(none().1)
            .bind([tenant])
            .bind([episode])
            .bind(none().0)
            .bind(none().1)
            .bind(time::OffsetDateTime::now_utc())
            .bind(["session"])
            .execute(&mut *sink)
            .await
            .unwrap();
        let free = sqlx::query("select from open_episode for update skip locked");
        let is_held = free.fetch_all(pool).await.unwrap().is_empty();
        // A transaction that is dropped rolls back later.
        sink.rollback().await.unwrap();
        is_held
    };
    assert!(held("default").await);
    assert!(!held("other").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn generations_that_sinks_hold_do_not_keep_the_closer_from_those_behind_them() {
    let stack = Stack::start("foreign-pages").await;
    let pool = &stack.pool;
    let (busy, quiet) = (Uuid::now_v7(), Uuid::now_v7());
    let mut last = Uuid::nil();
    for nth in 0..601 {
        last = generation(pool, "default", if nth < 600 { busy } else { quiet }).await;
    }
    let open = "insert into open_generation (generation_id, surface, closes_at) \
                select id, surface, case when episode_id = $1 then now() - interval '1 h' else now() - interval '1 min' end \
                from generation";
    sqlx::query(open).bind(busy).execute(pool).await.unwrap();
    let mut sink = edge::database::begin(pool).await.unwrap();
    sqlx::query("select pg_advisory_xact_lock_shared(1, hashtext('default' || $1::uuid) & 4095)")
        .bind(busy)
        .execute(&mut *sink)
        .await
        .unwrap();
    let short = ::ingest::Options {
        surface: vec![Definition {
            horizon_seconds: 0.001,
            ..Definition::completion()
        }],
        ..options()
    };
    let service = Service::start_with(&stack, short).await;
    eventually("the last one is closed", SOON, async || {
        let closed = sqlx::query_scalar("select exists (select from trajectory where generation_id = $1)");
        let is_closed: bool = closed.bind(last).fetch_one(pool).await.unwrap();
        is_closed.then_some(())
    })
    .await;
    sink.rollback().await.unwrap();
    eventually("the others are closed", SOON, async || {
        let open: i64 = sqlx::query_scalar("select count(*) from open_generation")
            .fetch_one(pool)
            .await
            .unwrap();
        (open == 0).then_some(())
    })
    .await;
    service.stop().await;
}

/// The pages that a statement touches. It is rolled back.
macro_rules! pages {
    ($pool:expr, $sql:expr $(, $value:expr)*) => {{
        let sql = format!("explain (analyze, buffers, format json) {}", $sql);
        let mut transaction = edge::database::begin(&$pool).await.unwrap();
        let mut pages = 0;
        // The first execution reads catalogs.
        for _ in 0..2 {
            let plan: Value = sqlx::query_scalar(sqlx::AssertSqlSafe(sql.clone()))
                $(.bind($value))*
                .fetch_one(&mut *transaction)
                .await
                .unwrap();
            let top = &plan[0]["Plan"];
            pages = top["Shared Hit Blocks"].as_u64().unwrap() + top["Shared Read Blocks"].as_u64().unwrap();
        }
        transaction.rollback().await.unwrap();
        pages
    }};
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_about_one_target_makes_no_later_event_slower() {
    let stack = Stack::start("foreign-flood").await;
    let pool = &stack.pool;
    let closed = generation(pool, "default", Uuid::now_v7()).await;
    close(pool, closed, None).await;
    let waiting = generation(pool, "default", Uuid::now_v7()).await;
    open(pool, waiting).await;
    for id in [closed, waiting] {
        feedback(pool, "default", id, "accept", 50_000).await;
    }
    let flood = "insert into retraction (id, tenant_id, feedback_id, reason, given_at) \
                 select uuidv7(), 'default', (select min(id::text)::uuid from feedback), '', now() from generate_series(1, 50000)";
    sqlx::query(flood).execute(pool).await.unwrap();
    sqlx::raw_sql("analyze").execute(pool).await.unwrap();
    let none = Vec::<String>::new();
    let early = include_str!("../../ingest/src/rows/join/close_early.sql");
    for (id, pages_max) in [(closed, 50), (waiting, 1_100)] {
        let pages = pages!(
            pool,
            early,
            [id],
            &none,
            Vec::<Uuid>::new(),
            ["completion"],
            ["accept"],
            1_000_i64
        );
        assert!(pages < pages_max, "{pages} pages for {id}");
    }
    let one: Uuid = sqlx::query_scalar("select id from retraction limit 1")
        .fetch_one(pool)
        .await
        .unwrap();
    let late = include_str!("../../ingest/src/rows/join/late_retractions.sql");
    let pages = pages!(pool, late, Vec::<Uuid>::new(), [one]);
    assert!(pages < 50, "{pages} pages for a retraction");
    let dryrun = include_str!("../../ingest/src/entry/api/dryrun.sql");
    let stored: i64 = sqlx::query(dryrun)
        .bind("default")
        .bind([closed])
        .bind([false])
        .fetch_one(pool)
        .await
        .unwrap()
        .get("feedback!");
    assert_eq!(stored, 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_prompts_are_found_without_reading_them() {
    let stack = Stack::start("foreign-prompts").await;
    let pool = &stack.pool;
    own(pool).await;
    let mut ids = Vec::new();
    for _ in 0..100 {
        ids.push(generation(pool, "default", Uuid::now_v7()).await);
    }
    // They do not compress, so each has 40 pages. The first and the last are equal.
    let long = "update generation set prompt_ids = long.ids from (
                    select g.id, array(select hashint8(g.nth % 99 * 100000 + n) & 65535 from generate_series(1, 80000) n) as ids
                    from (select id, row_number() over (order by id) as nth from generation) g) long
                where generation.id = long.id";
    sqlx::query(long).execute(pool).await.unwrap();
    let same = "select * from answers_to_the_same_prompt($1, 5000, 10)";
    let mut transaction = edge::database::begin(pool).await.unwrap();
    sqlx::raw_sql("set local springtide.all_tenants = 'on'")
        .execute(&mut *transaction)
        .await
        .unwrap();
    let found: Vec<Uuid> = sqlx::query_scalar(same)
        .bind(ids[0])
        .fetch_all(&mut *transaction)
        .await
        .unwrap();
    assert_eq!(found, [ids[99]]);
    let plan: Value = sqlx::query_scalar(sqlx::AssertSqlSafe(format!(
        "explain (analyze, buffers, format json) {same}"
    )))
    .bind(ids[0])
    .fetch_one(&mut *transaction)
    .await
    .unwrap();
    let pages = plan[0]["Plan"]["Shared Hit Blocks"].as_u64().unwrap();
    assert!(pages < 1_000, "{pages} pages");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_that_is_taken_back_after_its_horizon_is_asked_about_all_the_same() {
    let stack = Stack::start("foreign-judge").await;
    let pool = &stack.pool;
    let id = generation(pool, "default", Uuid::now_v7()).await;
    let text = Uuid::now_v7();
    for statement in [
        "insert into feedback (id, tenant_id, generation_id, metric_name, value_text, given_at) \
         select $2, 'default', id, 'comment', 'no', finished_at + interval '1 s' from generation where id = $1",
        "insert into judgement (feedback_id, tenant_id, judge, text_digest) select $2, 'default', 'j', '\\x00' where $1 <> $2",
        "insert into retraction (id, tenant_id, feedback_id, reason, given_at) \
         select uuidv7(), 'default', $2, '', finished_at + interval '10 s' from generation where id = $1",
    ] {
        sqlx::query(statement).bind(id).bind(text).execute(pool).await.unwrap();
    }
    let is_retracted = async |definition: Value| -> bool {
        define(pool, &definition).await;
        sqlx::query(include_str!("../../ingest/src/rows/judgement/read.sql"))
            .bind(["default"])
            .bind([text])
            .bind("j")
            .bind([0_u8].as_slice())
            .bind(4096_i64)
            .fetch_one(pool)
            .await
            .unwrap()
            .get("is_retracted!")
    };
    assert!(!is_retracted(serde_json::json!({"horizon_seconds": 3.0, "close_on_feedback": false})).await);
    assert!(is_retracted(serde_json::json!({"horizon_seconds": 60.0, "close_on_feedback": false})).await);
    assert!(!is_retracted(serde_json::json!({"horizon_seconds": 60.0, "close_on_feedback": true})).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_reader_does_not_keep_orphans_from_the_dead_letters() {
    let stack = Stack::start("foreign-reader").await;
    let ingest = stack.pool_of("ingest");
    let mut reader = edge::database::begin_with(&ingest, "begin isolation level repeatable read read only")
        .await
        .unwrap();
    sqlx::query("select count(*) from generation")
        .execute(&mut *reader)
        .await
        .unwrap();
    feedback(&stack.pool, "default", Uuid::now_v7(), "accept", 1).await;
    let soon = ::ingest::Options {
        orphan_ttl_seconds: 1.0,
        ..options()
    };
    let service = Service::start_with(&stack, soon).await;
    eventually("the orphan is found", SOON, async || {
        let found: i64 = sqlx::query_scalar("select count(*) from feedback where orphaned_at is not null")
            .fetch_one(&stack.pool)
            .await
            .unwrap();
        (found == 1).then_some(())
    })
    .await;
    reader.rollback().await.unwrap();
    service.stop().await;
}
