//! Retention deletes old weeks with everything about them, keeps their totals, and spares what a
//! run needs. Beyond the disk limit, events are refused before they are acknowledged.

use std::time::Duration;

use ingest::event::Event;
use serde_json::json;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ingest::{Service, accept, count, dead_letters, generation, options, send, stored};
use crate::support::{Stack, eventually};

const SOON: Duration = Duration::from_secs(90);

/// A UUIDv7 from `days_ago`.
fn id_of(days_ago: i64, number: u64) -> Uuid {
    let time = OffsetDateTime::now_utc() - time::Duration::days(days_ago);
    let milliseconds = u128::from(time.unix_timestamp().cast_unsigned() * 1_000);
    let bits = milliseconds << 80 | 7 << 76 | 2 << 62 | u128::from(number);
    Uuid::from_u128(bits)
}

/// The partition of the week of `days_ago`, created if needed.
async fn partition(pool: &PgPool, days_ago: i64) -> String {
    let sql = "with week as (select date_trunc('week', now() at time zone 'utc' - make_interval(days => $1)) as monday), \
               bounds as (select to_char(monday, '\"generation_\"IYYY\"w\"IW') as name, \
                   (lpad(to_hex((extract(epoch from monday) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid as from_id, \
                   (lpad(to_hex((extract(epoch from monday + interval '7 days') * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid \
                       as until_id from week) \
               select name from bounds, lateral (select create_generation_partition(name, from_id, until_id)) made";
    let days = i32::try_from(days_ago).unwrap();
    sqlx::query_scalar(sql).bind(days).fetch_one(pool).await.unwrap()
}

async fn exists(pool: &PgPool, partition: &str) -> bool {
    let sql = "select to_regclass($1) is not null";
    sqlx::query_scalar(sql).bind(partition).fetch_one(pool).await.unwrap()
}

async fn execute(pool: &PgPool, sql: &'static str, id: Uuid) {
    sqlx::query(sql).bind(id).execute(pool).await.unwrap();
}

/// Stores a generation through the sink. It stays open.
async fn store(stack: &Stack, id: Uuid) {
    let mut event = ::ingest::event::Generation {
        id,
        episode_id: id,
        ..generation()
    }
    .into_event("default", "tests");
    event.time = OffsetDateTime::now_utc();
    send(stack, &[event]).await;
}

const CLOSE: &str = "delete from open_generation where generation_id = $1";
const CENSOR: &str = "insert into trajectory (generation_id, surface, reward_definition, censor_code) \
                      values ($1, 'completion', 1, 'no_feedback')";
const REWARD: &str =
    "insert into trajectory (generation_id, surface, reward_definition, reward) values ($1, 'completion', 1, 0.75)";
const RUN: &str = "insert into run (id, kind, policy, line, status, config) values ($1, 'realtime', 'demo', 'realtime', 'running', '{}')";

async fn ledger(pool: &PgPool) -> (i64, i64) {
    let remaining = count(pool, "select count(*) from ledger").await;
    let expired = count(
        pool,
        "select coalesce(sum(generations), 0)::bigint from expired_generation",
    )
    .await;
    (remaining, expired)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_week_is_deleted_with_everything_about_it_but_its_totals_stay() {
    let stack = Stack::start("retention").await;
    let pool = &stack.pool;
    let kept_for_ever = ::ingest::Options {
        retention_days: 0,
        surface: vec![::ingest::reward::Definition {
            horizon_seconds: 3600.0,
            ..::ingest::reward::Definition::completion()
        }],
        ..options()
    };
    let (old, queued, young) = (
        partition(pool, 90).await,
        partition(pool, 60).await,
        partition(pool, 10).await,
    );
    let service = Service::start_with(&stack, kept_for_ever.clone()).await;
    let ids = [id_of(90, 1), id_of(90, 2), id_of(60, 1), id_of(10, 1)];
    for id in ids {
        store(&stack, id).await;
    }
    let feedback: Vec<Event> = ids.iter().map(|id| accept(*id, true)).collect();
    send(&stack, &feedback).await;
    stored(pool, 8).await;
    service.stop().await;
    for (id, ending) in ids.into_iter().zip([CENSOR, REWARD, REWARD, REWARD]) {
        execute(pool, CLOSE, id).await;
        execute(pool, ending, id).await;
    }
    execute(pool, RUN, Uuid::now_v7()).await;
    let trained = "insert into disposition (generation_id, kind, code) values ($1, 'dropped', 'stale')";
    execute(pool, trained, ids[1]).await;
    sqlx::query("update event_key set received_at = now() - interval '100 days' where event_id = $1")
        .bind(ids[0].to_string())
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(ledger(pool).await, (4, 0));

    // The run may still train on the second week's queued trajectories, so that week and all later
    // ones stay.
    let kept_for_a_month = ::ingest::Options {
        retention_days: 30,
        ..kept_for_ever
    };
    let service = Service::start_with(&stack, kept_for_a_month.clone()).await;
    eventually("the oldest week is deleted", SOON, async || {
        (!exists(pool, &old).await).then_some(())
    })
    .await;
    assert!(exists(pool, &queued).await && exists(pool, &young).await);
    assert_eq!(ledger(pool).await, (2, 2));
    let totals: Vec<(String, String, i64)> =
        sqlx::query_as("select disposition, code, generations from expired_generation order by 1")
            .fetch_all(pool)
            .await
            .unwrap();
    let total = |disposition: &str, code: &str| (disposition.to_owned(), code.to_owned(), 1);
    assert_eq!(totals, [total("censored", "no_feedback"), total("dropped", "stale")]);
    assert_eq!(count(pool, "select count(*) from feedback").await, 2);
    assert_eq!(count(pool, "select count(*) from trajectory").await, 2);
    assert_eq!(count(pool, "select count(*) from event_key").await, 7);

    // Feedback about a deleted generation is refused over HTTP and becomes a dead letter from
    // Kafka.
    let late = json!({"generation_id": ids[0], "metric_name": "accept", "value": true});
    let answer = eventually("the horizon is known", SOON, async || {
        let (status, answer) = service.post("/v1/feedback", &late).await;
        (status != 200).then_some((status, answer))
    })
    .await;
    assert_eq!(
        (answer.0, answer.1["field"].as_str()),
        (400, Some("generation_id")),
        "{answer:?}"
    );
    let before = count(pool, "select count(*) from feedback").await;
    send(&stack, &[accept(ids[1], true)]).await;
    let record = dead_letters(&stack, 1).await.remove(0);
    assert_eq!(record.headers["reason"], "invalid");
    assert!(
        record.headers["detail"].contains("have been deleted"),
        "{:?}",
        record.headers
    );
    assert_eq!(count(pool, "select count(*) from feedback").await, before);
    service.stop().await;

    // Once the run has ended, the second week is deleted too.
    sqlx::query("update run set status = 'cancelled', finished_at = now()")
        .execute(pool)
        .await
        .unwrap();
    let service = Service::start_with(&stack, kept_for_a_month).await;
    eventually("the second week is deleted", SOON, async || {
        (!exists(pool, &queued).await).then_some(())
    })
    .await;
    assert!(exists(pool, &young).await);
    assert_eq!(ledger(pool).await, (1, 3));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_the_disk_limit_the_oldest_week_is_deleted_and_then_events_are_refused() {
    let stack = Stack::start("disk").await;
    let pool = &stack.pool;
    let last_month = partition(pool, 30).await;
    let tight = ::ingest::Options {
        disk_bytes_max: 1,
        ..options()
    };
    let service = Service::start_with(&stack, tight).await;
    eventually("last month's week is deleted", SOON, async || {
        (!exists(pool, &last_month).await).then_some(())
    })
    .await;
    let event = json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
    let (status, headers) = eventually("events are refused", SOON, async || {
        let body = event.to_string();
        let (status, headers, _) = service.post_with("/v1/feedback", &[crate::ingest::JSON], body).await;
        (status != 200).then_some((status, headers))
    })
    .await;
    assert_eq!((status, headers["retry-after"].to_str().unwrap()), (507, "60"));
    let (status, answer) = service.post("/v1/feedback?dryrun=true", &event).await;
    assert_eq!(status, 200, "{answer}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreferenced_payload_is_deleted() {
    use ::ingest::payload::{Store, TOKEN_IDS, token_bytes};

    let stack = Stack::start("unnamed").await;
    let folder = stack.dir.path().join("payloads");
    let url = format!("file://{}", folder.display());
    let store = Store::open(&url).unwrap();
    let put = async |tenant: &'static str, id: u32| {
        let bytes = token_bytes(&[id]);
        store.put(tenant, bytes.into(), TOKEN_IDS).await.unwrap()
    };
    let named = put("default", 1).await;
    // The same bytes of another tenant are another payload.
    let (unnamed, strange) = (put("default", 2).await, put("other", 1).await);
    let options = ::ingest::Options {
        payload_store: Some(url.clone()),
        ..options()
    };
    let service = Service::start_with(&stack, options.clone()).await;
    let event = ::ingest::event::Generation {
        payload: Some(named.clone()),
        ..generation()
    }
    .into_event("default", "tests");
    send(&stack, &[event]).await;
    eventually("it is stored", SOON, async || {
        (count(&stack.pool, "select count(*) from payload_reference").await == 1).then_some(())
    })
    .await;
    service.stop().await;

    // A week and a day later, and long enough after the last sweep.
    let week_ago = std::time::SystemTime::now() - Duration::from_secs(8 * 24 * 3600);
    let file = |tenant: &str, digest: &[u8; 32]| {
        let tenant = blake3::hash(tenant.as_bytes()).to_hex();
        folder
            .join("payload")
            .join(&*tenant)
            .join(&*blake3::Hash::from_bytes(*digest).to_hex())
    };
    for path in [
        file("default", &named.digest),
        file("default", &unnamed.digest),
        file("other", &strange.digest),
    ] {
        let opened = std::fs::File::options().write(true).open(path).unwrap();
        opened.set_modified(week_ago).unwrap();
    }
    let young = put("default", 3).await;
    sqlx::query("update payload_sweep set begun_at = now() - interval '7 hours'")
        .execute(&stack.pool)
        .await
        .unwrap();
    let kept_for_ever = ::ingest::Options {
        payload_unnamed_hours: 0,
        ..options.clone()
    };
    Service::start_with(&stack, kept_for_ever).await.stop().await;
    store.check_exists("default", &unnamed).await.unwrap();
    let service = Service::start_with(&stack, options).await;
    for (tenant, payload) in [("default", &unnamed), ("other", &strange)] {
        eventually("it is deleted", SOON, async || {
            store.check_exists(tenant, payload).await.err().map(drop)
        })
        .await;
    }
    store.check_exists("default", &named).await.unwrap();
    store.check_exists("default", &young).await.unwrap();
    service.stop().await;
}
