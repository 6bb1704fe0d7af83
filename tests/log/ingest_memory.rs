//! The closer reads only what its rules need, in pages that fit into memory, however much feedback
//! an episode has.

use std::time::Duration;

use ingest::reward::{Definition, Metric, MetricType};
use sqlx::PgPool;
use uuid::Uuid;

use fixture::ingest::{Service, count, options};
use fixture::{Stack, eventually};

const PATIENCE: Duration = Duration::from_secs(180);
const GENERATIONS: i32 = 500;
const COMMENTS: i32 = 1_000;
const COMMENT_BYTES: i32 = 64 * 1024;
/// What one page of the closer may hold of texts.
const PAGE_BYTES_MAX: i64 = 64 * 1024 * 1024;

/// An episode of generations that are due, with [`COMMENTS`] and one accept about the whole.
async fn fill(pool: &PgPool, surface: &str, generations: i32) {
    let episode = Uuid::now_v7();
    for statement in [
        "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, \
             surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p, \
             finish_reason, declined, sampled_at, finished_at) \
         select uuidv7(), 'default', 'demo', 1, 1, '[[1, 1]]', '\\x00', 'realtime', 'replica-1', 'production', $2, $1, 'user', \
                'champion', 1, array[1], array[2], array[-0.5::real], 1, 1, 'stop', false, now(), now() \
         from generate_series(1, $3)",
        "insert into feedback (id, tenant_id, episode_id, metric_name, value_text, given_at) \
         select uuidv7(), 'default', $1, 'comment', repeat('x', $4), (select min(finished_at) from generation where episode_id = $1) \
         from generate_series(1, $3) where $2 <> ''",
        "insert into feedback (id, tenant_id, episode_id, metric_name, value_bool, given_at) \
         select uuidv7(), 'default', $1, 'accept', true, min(finished_at) from generation \
         where episode_id = $1 and surface = $2 and $3 > 0",
        "insert into open_generation (generation_id, surface, closes_at) \
         select id, surface, now() from generation where episode_id = $1 and surface = $2 and $3 > 0",
    ] {
        let rows = if statement.contains("'comment'") {
            COMMENTS
        } else {
            generations
        };
        let mut query = sqlx::query(statement).bind(episode).bind(surface).bind(rows);
        if statement.contains("$4") {
            query = query.bind(COMMENT_BYTES);
        }
        query.execute(pool).await.unwrap();
    }
}

/// Rows and bytes of texts that a page of the closer reads for these generations.
async fn read(pool: &PgPool, generations: i64, metric: &str, signals_max: i64, texts: bool) -> (i64, i64) {
    let ids: Vec<Uuid> = sqlx::query_scalar("select id from generation order by id limit $1")
        .bind(generations)
        .fetch_all(pool)
        .await
        .unwrap();
    let sql = format!(
        "select count(*), coalesce(sum(octet_length(value_text)), 0)::bigint from ({}) page",
        include_str!("../../ingest/src/rows/feedback.sql")
    );
    sqlx::query_as(sqlx::AssertSqlSafe(sql))
        .bind(&ids)
        .bind(vec!["completion"])
        .bind(vec![metric])
        .bind(vec![signals_max])
        .bind(vec![texts])
        .bind(50_001_i64)
        .fetch_one(pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn comments_that_no_reward_reads_are_not_fetched() {
    let stack = Stack::start("comments").await;
    fill(&stack.pool, "completion", GENERATIONS).await;
    // Everything about the episode would be 500 × 1,000 × 64 KiB.
    assert_eq!(read(&stack.pool, 500, "accept", 1_000, false).await, (500, 0));
    // An expression that counts them reads no texts, and the page ends at its limit.
    assert_eq!(read(&stack.pool, 500, "comment", 1_000, false).await, (50_001, 0));
    let service = Service::start(&stack).await;
    eventually("all are closed", PATIENCE, async || {
        let accepted = "select count(*) from trajectory where signal = 'accept'";
        (count(&stack.pool, accepted).await == i64::from(GENERATIONS)).then_some(())
    })
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reward_that_reads_texts_gets_few_at_a_time() {
    let stack = Stack::start("texts").await;
    fill(&stack.pool, "completion", 50).await;
    // `rows::feedback` reads eight generations at a time here, and the first 64 texts about each.
    let (rows, bytes) = read(&stack.pool, 8, "comment", 64, true).await;
    assert_eq!(rows, 8 * 64);
    assert!(bytes <= PAGE_BYTES_MAX, "{bytes} bytes");
    let options = ingest::Options {
        surface: vec![Definition {
            horizon_seconds: 2.0,
            reward: Some("comment == null ? null : double(all.comment.size())".to_owned()),
            ..Definition::completion()
        }],
        metric: vec![Metric::new("comment", MetricType::Comment)],
        ..options()
    };
    let service = Service::start_with(&stack, options).await;
    eventually("all are closed", PATIENCE, async || {
        let counted = "select count(*) from trajectory where reward = 64";
        (count(&stack.pool, counted).await == 50).then_some(())
    })
    .await;
    service.stop().await;
}
