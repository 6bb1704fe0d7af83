//! Retention deletes old weeks with everything about them, keeps their totals, and spares what a
//! run needs. Beyond the disk limit, events are refused before they are acknowledged. Over 500 lines,
//! because all cases fill the same weeks.

use std::time::Duration;

use edge::auth::{AuthOptions, Role};
use event_log::event::Event;
use serde_json::json;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use fixture::ingest::{
    Service, accept, count, dead_letters, generation, number_of_dead_letters, options, send, stored,
};
use fixture::{Stack, create_key, eventually};

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

/// Waits until the week is deleted.
async fn deleted(pool: &PgPool, partition: &str) {
    eventually("the week is deleted", SOON, async || {
        (!exists(pool, partition).await).then_some(())
    })
    .await;
}

/// What a process does that begins to delete a week.
async fn refuse(pool: &PgPool, partition: &str, until: Uuid) {
    let refuse = sqlx::query("select refuse_generations($1, $2)");
    refuse.bind(partition).bind(until).execute(pool).await.unwrap();
}

async fn execute(pool: &PgPool, sql: &'static str, id: Uuid) {
    sqlx::query(sql).bind(id).execute(pool).await.unwrap();
}

/// Stores a generation through the sink. It stays open.
async fn store(stack: &Stack, id: Uuid) {
    let mut event = event_log::event::Generation {
        id,
        episode_id: id,
        ..generation()
    }
    .into_event("default", "tests");
    event.time = OffsetDateTime::now_utc();
    send(stack, &[event]).await;
}

const OPEN: &str = "insert into open_generation values ($1, 'completion', now() + interval '1 hour')";
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
    deleted(pool, &old).await;
    assert!(exists(pool, &queued).await && exists(pool, &young).await);
    assert_eq!(ledger(pool).await, (2, 2));
    let totals: Vec<(String, String, i64)> =
        sqlx::query_as("select disposition, code, generations from expired_generation order by 1")
            .fetch_all(pool)
            .await
            .unwrap();
    let total = |disposition: &str, code: &str| (disposition.to_owned(), code.to_owned(), 1);
    assert_eq!(totals, [total("censored", "no_feedback"), total("dropped", "stale")]);
    eventually("everything about it is deleted", SOON, async || {
        let kept = "select (select count(*) from feedback) * 100 + (select count(*) from trajectory) * 10 \
                    + (select count(*) from event_key)";
        (count(pool, kept).await == 227).then_some(())
    })
    .await;

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
    deleted(pool, &queued).await;
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
    deleted(pool, &last_month).await;
    let event = json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
    let (status, headers) = eventually("events are refused", SOON, async || {
        let body = event.to_string();
        let (status, headers, _) = service.post_with("/v1/feedback", &[fixture::ingest::JSON], body).await;
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
    use event_log::payload::{Store, TOKEN_IDS, token_bytes};

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
    let event = event_log::event::Generation {
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

/// Keeps generations open, and deletes those that are older than a month.
fn kept_for_a_month() -> ::ingest::Options {
    ::ingest::Options {
        retention_days: 30,
        surface: vec![::ingest::reward::Definition {
            horizon_seconds: 3600.0,
            ..::ingest::reward::Definition::completion()
        }],
        ..options()
    }
}

/// Stores a generation of `days_ago`, which is closed and has no feedback.
async fn closed(stack: &Stack, days_ago: i64, number: u64) -> Uuid {
    let id = id_of(days_ago, number);
    let kept = ::ingest::Options {
        retention_days: 0,
        ..kept_for_a_month()
    };
    let service = Service::start_with(stack, kept).await;
    store(stack, id).await;
    eventually("it is stored", SOON, async || {
        let sql = "select count(*) from generation where id = $1";
        let rows: i64 = sqlx::query_scalar(sql).bind(id).fetch_one(&stack.pool).await.unwrap();
        (rows == 1).then_some(())
    })
    .await;
    service.stop().await;
    execute(&stack.pool, CLOSE, id).await;
    execute(&stack.pool, CENSOR, id).await;
    id
}

#[tokio::test(flavor = "multi_thread")]
async fn content_of_a_surface_goes_before_its_week_also_when_it_comes_late() {
    let stack = Stack::start("content").await;
    let pool = &stack.pool;
    let notes = ::ingest::reward::Definition {
        name: "notes".to_owned(),
        ..::ingest::reward::Definition::completion()
    };
    let kept = ::ingest::Options {
        surface: vec![::ingest::reward::Definition::completion(), notes],
        ..options()
    };
    let of = |days_ago, number, surface: &str| {
        let id = id_of(days_ago, number);
        event_log::event::Generation {
            id,
            episode_id: id,
            surface: surface.to_owned(),
            ..generation()
        }
    };
    let comment = |generation_id, text: &str| {
        let said = event_log::event::Feedback {
            id: Uuid::now_v7(),
            target: event_log::event::Target::Generation(generation_id),
            metric_name: "comment".to_owned(),
            value: event_log::event::Value::Text(text.to_owned()),
            tags: Default::default(),
        };
        said.into_event("default", "tests", event_log::event::now())
    };
    let (old, other, young) = (of(9, 1, "notes"), of(9, 2, "completion"), of(6, 3, "notes"));
    let (late, late_other) = (of(9, 4, "notes"), of(9, 5, "completion"));
    let service = Service::start_with(&stack, kept.clone()).await;
    let all = [&old, &other, &young].map(|one| one.clone().into_event("default", "tests"));
    send(&stack, &all).await;
    send(&stack, &[comment(old.id, "one"), comment(other.id, "two")]).await;
    stored(pool, 5).await;
    service.stop().await;

    let service = Service::start_with(
        &stack,
        ::ingest::Options {
            retention: vec![::ingest::ContentRetention {
                tenant: None,
                surface: Some("notes".to_owned()),
                days: 7,
            }],
            ..kept
        },
    )
    .await;
    eventually("the horizon has been walked to", SOON, async || {
        let sql = "select count(*) from content_horizon where walked_id = until_id";
        (count(pool, sql).await == 1).then_some(())
    })
    .await;
    let late_events = [&late, &late_other].map(|one| one.clone().into_event("default", "tests"));
    send(&stack, &late_events).await;
    send(&stack, &[comment(late.id, "three")]).await;
    stored(pool, 8).await;

    let content: Vec<(Uuid, bool, bool)> = sqlx::query_as(
        "select g.id, g.token_ids <> '{}' and g.prompt_ids <> '{}' and g.user_key not like 'anonymous-%',
                exists (select from disposition d where d.generation_id = g.id and d.kind = 'erased')
         from generation g",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    let content: std::collections::BTreeMap<Uuid, (bool, bool)> = content
        .into_iter()
        .map(|(id, has, erased)| (id, (has, erased)))
        .collect();
    let expected = [
        (old.id, (false, true)),
        (late.id, (false, true)),
        (other.id, (true, false)),
        (late_other.id, (true, false)),
        (young.id, (true, false)),
    ];
    assert_eq!(content, expected.into());
    let texts: Vec<String> = sqlx::query_scalar("select value_text from feedback order by value_text")
        .fetch_all(pool)
        .await
        .unwrap();
    assert_eq!(texts, ["", "", "two"]);
    assert_eq!(ledger(pool).await, (5, 0));
    service.stop().await;
}

/// The first id after the week of a partition.
async fn end_of(pool: &PgPool, days_ago: i32) -> Uuid {
    let sql = "select first_generation_id((date_trunc('week', now() at time zone 'utc' - make_interval(days => $1)) \
               + interval '7 days') at time zone 'utc')";
    sqlx::query_scalar(sql).bind(days_ago).fetch_one(pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_that_is_backfilled_into_an_expiring_week_is_refused_and_leaves_no_open_row() {
    let stack = Stack::start("backfill").await;
    let pool = &stack.pool;
    let old = partition(pool, 90).await;
    let first = closed(&stack, 90, 1).await;
    // One is still open, so the week stays.
    execute(pool, OPEN, first).await;
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    let refused = "select count(*) from pg_constraint where conname = 'generation_refused'";
    eventually("the week refuses generations", SOON, async || {
        (count(pool, refused).await == 2).then_some(())
    })
    .await;
    // One of the week, and one from before any partition.
    store(&stack, id_of(90, 2)).await;
    store(&stack, id_of(120, 3)).await;
    for letter in dead_letters(&stack, 2).await {
        assert!(letter.headers["detail"].contains("refused"), "{:?}", letter.headers);
    }
    assert!(exists(pool, &old).await);
    assert_eq!(count(pool, "select count(*) from open_generation").await, 1);
    service.stop().await;

    execute(pool, CLOSE, first).await;
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    deleted(pool, &old).await;
    assert_eq!(ledger(pool).await, (0, 1));
    assert_eq!(count(pool, "select count(*) from open_generation").await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_generations_of_an_expiring_week_are_refused_before_they_reach_the_tables() {
    let stack = Stack::start("late_week").await;
    let pool = &stack.pool;
    let old = partition(pool, 90).await;
    let first = closed(&stack, 90, 1).await;
    execute(pool, "delete from trajectory where generation_id = $1", first).await;
    execute(pool, OPEN, first).await;
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    let late = serde_json::to_value(generation()).unwrap();
    // Such a generation is stored until the first round refuses its week.
    let answer = eventually("the API refuses generations of the week", SOON, async || {
        let mut late = late.clone();
        late["generation_id"] = json!(id_of(90, rand::random::<u32>().into()));
        let (status, answer) = service.post("/v1/generations", &late).await;
        (status == 400).then_some(answer)
    })
    .await;
    assert!(answer.to_string().contains("of that age are refused"), "{answer}");
    service.stop().await;

    // After a restart, the sink knows it before it reads. What is there still takes feedback.
    let dead = usize::try_from(number_of_dead_letters(&stack)).unwrap();
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    store(&stack, id_of(90, 3)).await;
    let letters = dead_letters(&stack, dead + 1).await;
    assert_eq!(letters.last().unwrap().headers["reason"], "invalid");
    let (status, answer) = service
        .post(
            "/v1/feedback",
            &json!({"generation_id": first, "metric_name": "accept", "value": true}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    eventually("the feedback is stored", SOON, async || {
        (count(pool, "select count(*) from feedback where not late").await == 1).then_some(())
    })
    .await;
    assert!(exists(pool, &old).await);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_week_that_need_not_go_after_all_takes_generations_again() {
    let stack = Stack::start("reprieve").await;
    let pool = &stack.pool;
    let week = partition(pool, 10).await;
    let open = closed(&stack, 10, 1).await;
    execute(pool, OPEN, open).await;
    let until = end_of(pool, 10).await;
    // The disk is not full any more; or it is, but the week is needed.
    for disk_bytes_max in [0, 1] {
        // What an earlier process had begun for room.
        refuse(pool, &week, until).await;
        let options = ::ingest::Options {
            disk_bytes_max,
            ..kept_for_a_month()
        };
        let service = Service::start_with(&stack, options).await;
        eventually("the week accepts generations", SOON, async || {
            let refused = "select (select count(*) from generation_expiry) \
                           + (select count(*) from pg_constraint where conname = 'generation_refused')";
            (count(pool, refused).await == 0).then_some(())
        })
        .await;
        assert!(exists(pool, &week).await);
        service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_without_a_partition_expires_with_the_weeks() {
    let stack = Stack::start("unpartitioned").await;
    let pool = &stack.pool;
    closed(&stack, 90, 1).await;
    assert_eq!(count(pool, "select count(*) from generation_default").await, 1);
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    eventually("it is deleted", SOON, async || {
        (ledger(pool).await == (0, 1)).then_some(())
    })
    .await;
    eventually("its trajectory is deleted", SOON, async || {
        (count(pool, "select count(*) from trajectory").await == 0).then_some(())
    })
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_week_has_statistics_of_single_tokens() {
    let stack = Stack::start("statistics").await;
    partition(&stack.pool, 0).await;
    let arrays = "select string_agg(c.relname || '.' || a.attname, ' ' order by 1) \
                  from pg_class c join pg_attribute a on a.attrelid = c.oid join pg_type t on t.oid = a.atttypid \
                  where c.relname like 'generation%' and c.relkind in ('r', 'p') and t.typcategory = 'A' \
                    and a.attstattarget is distinct from 0";
    let counted: Option<String> = sqlx::query_scalar(arrays).fetch_one(&stack.pool).await.unwrap();
    assert_eq!(
        counted, None,
        "ANALYZE counts their elements, which holds all others back"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_reader_delays_a_drop_but_loses_no_work_and_stops_nobody() {
    let stack = Stack::start("reader").await;
    let pool = &stack.pool;
    let old = partition(pool, 90).await;
    closed(&stack, 90, 1).await;
    let until = end_of(pool, 90).await;
    // An earlier round got as far as this.
    refuse(pool, &old, until).await;
    // The reader also prevents that a restart creates partitions. The service starts anyway.
    let next = sqlx::query_scalar::<_, String>(
        "select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = 'trajectory'::regclass and c.relname like 'trajectory_2%' order by 1 desc limit 1",
    );
    let next = next.fetch_one(pool).await.unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("drop table {next}")))
        .execute(pool)
        .await
        .unwrap();
    let mut reader = edge::database::begin(pool).await.unwrap();
    sqlx::query("select (select count(*) from generation) + (select count(*) from trajectory)")
        .execute(&mut *reader)
        .await
        .unwrap();
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    eventually("the week is counted", SOON, async || {
        (count(pool, "select count(*) from expiring_generation").await == 1).then_some(())
    })
    .await;
    // The sink goes on, and the week is there as a whole.
    store(&stack, id_of(0, 2)).await;
    eventually("a generation is stored", SOON, async || {
        (ledger(pool).await == (2, 0)).then_some(())
    })
    .await;
    assert!(exists(pool, &old).await);
    service.stop().await;

    reader.rollback().await.unwrap();
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    deleted(pool, &old).await;
    assert_eq!(ledger(pool).await, (1, 1));
    assert!(exists(pool, &next).await);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_users_wrote_about_unknown_generations_expires_by_its_age() {
    let stack = Stack::start("unattached").await;
    let pool = &stack.pool;
    let known = closed(&stack, 10, 1).await;
    // One of each kind: about a stored generation, about an unknown one, and a recent one.
    let statement = "with target (feedback, stored, episode) as (values \
                         ('019a0000-0000-7000-8000-000000000001'::uuid, now() - interval '40 days', $1::uuid), \
                         ('019a0000-0000-7000-8000-000000000002', now() - interval '40 days', gen_random_uuid()), \
                         ('019a0000-0000-7000-8000-000000000003', now() - interval '20 days', gen_random_uuid())), \
                     told as (insert into feedback (id, tenant_id, episode_id, metric_name, value_text, given_at, stored_at) \
                              select feedback, 'default', episode, 'comment', 'text', stored, stored from target), \
                     taken as (insert into retraction (id, tenant_id, feedback_id, reason, given_at, stored_at) \
                               select gen_random_uuid(), 'default', feedback, 'text', stored, stored from target), \
                     stray as (insert into retraction (id, tenant_id, feedback_id, reason, given_at, stored_at) \
                               select gen_random_uuid(), 'default', gen_random_uuid(), 'text', stored, stored \
                               from target where episode <> $1) \
                     insert into episode_end (tenant_id, episode_id, ended_at, stored_at) \
                     select 'default', episode, stored, stored from target";
    sqlx::query(statement).bind(known).execute(pool).await.unwrap();
    let service = Service::start_with(&stack, kept_for_a_month()).await;
    eventually("the old ones are deleted", SOON, async || {
        let ends = count(pool, "select count(*) from episode_end").await;
        (ends == 2).then_some(())
    })
    .await;
    let left: Vec<String> = sqlx::query_scalar("select right(id::text, 1) from feedback order by 1")
        .fetch_all(pool)
        .await
        .unwrap();
    assert_eq!(left, ["1", "3"]);
    let left: Vec<Option<String>> = sqlx::query_scalar(
        "select right(f.id::text, 1) from retraction r left join feedback f on f.id = r.feedback_id order by 1",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    assert_eq!(left, [Some("1".to_owned()), Some("3".to_owned()), None]);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_keeps_the_contexts_above_it_but_not_for_ever() {
    let stack = Stack::start("lineage").await;
    let pool = &stack.pool;
    for days_ago in [90, 60] {
        partition(pool, days_ago).await;
    }
    let until = end_of(pool, 90).await;
    let (first, second, third) = (
        closed(&stack, 90, 1).await,
        closed(&stack, 60, 2).await,
        closed(&stack, 0, 3).await,
    );
    let continues = "update generation set parent_id = $1, prompt_prefix_len = 4 where id = $2";
    for (parent, child) in [(first, second), (second, third)] {
        sqlx::query(continues)
            .bind(parent)
            .bind(child)
            .execute(pool)
            .await
            .unwrap();
    }
    let needed = async || -> Option<String> {
        let needed = sqlx::query_scalar("select generations_needed($1)");
        needed.bind(until).fetch_one(pool).await.unwrap()
    };
    assert_eq!(needed().await, None, "everything is closed");
    execute(pool, "delete from trajectory where generation_id = $1", third).await;
    execute(pool, OPEN, third).await;
    assert_eq!(needed().await.as_deref(), Some("parent"), "two turns above");
    // A parent of another tenant counts as missing for readers, and holds nothing.
    execute(pool, "update generation set tenant_id = 'other' where id = $1", second).await;
    assert_eq!(needed().await, None);
    execute(
        pool,
        "update generation set tenant_id = 'default' where id = $1",
        second,
    )
    .await;
    // A turn that came after the week began to be refused cannot keep it.
    sqlx::query("insert into generation_expiry (until_id) values ($1)")
        .bind(until)
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(needed().await.as_deref(), Some("parent"));
    execute(
        pool,
        "update generation set stored_at = now() + interval '1 minute' where id = $1",
        third,
    )
    .await;
    assert_eq!(needed().await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_would_cost_others_their_history_is_refused_and_they_are_not() {
    let stack = Stack::start("tenants").await;
    let pool = &stack.pool;
    let old = partition(pool, 30).await;
    let recent = closed(&stack, 0, 1).await;
    // "quiet" has the old week. "busy" has most of everything.
    let fill = "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, \
                    purpose, surface, episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, \
                    temperature, top_p, finish_reason, declined, sampled_at) \
                select (left(first_generation_id(at)::text, 14) || '7' || substr(md5(random()::text), 1, 3) || '-8' \
                        || substr(md5(random()::text), 1, 3) || '-' || substr(md5(random()::text), 1, 12))::uuid, \
                       tenant, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface, episode_id, \
                       user_key, arm, arm_probability, array(select (random() * 1e9)::int + n + i from generate_series(1, 400) i), \
                       token_ids, logprobs, temperature, top_p, finish_reason, declined, at \
                from generation, generate_series(1, $2) n, \
                     lateral (select $3 as tenant, now() - make_interval(days => $4) as at) made where id = $1";
    for (tenant, rows, days_ago) in [("quiet", 2_000, 30), ("busy", 5_000, 0)] {
        let filled = sqlx::query(fill).bind(recent).bind(rows).bind(tenant).bind(days_ago);
        filled.execute(pool).await.unwrap();
    }
    let bytes: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(format!(
        "select sum(\"bytes!\")::bigint from ({}) sizes",
        include_str!("../../ingest/src/upkeep/sizes.sql")
    )))
    .fetch_one(pool)
    .await
    .unwrap();
    let tight = ::ingest::Options {
        disk_bytes_max: bytes.unsigned_abs() * 107 / 100,
        ..kept_for_a_month()
    };
    let required = AuthOptions {
        required: true,
        ..AuthOptions::default()
    };
    let service = Service::start_behind(&stack, tight, required).await;
    let mut keys = Vec::new();
    for tenant in ["quiet", "busy"] {
        keys.push(create_key(pool, tenant, Role::Serving, "test").await);
    }
    let send = async |key: &str| {
        let event = json!({"generation_id": Uuid::now_v7(), "metric_name": "accept", "value": true});
        let bearer = format!("Bearer {key}");
        let headers = [fixture::ingest::JSON, ("authorization", bearer.as_str())];
        service.post_with("/v1/feedback", &headers, event.to_string()).await.0
    };
    eventually("the busy tenant is refused", SOON, async || {
        (send(&keys[1]).await == 507).then_some(())
    })
    .await;
    assert_eq!(send(&keys[0]).await, 200);
    assert!(exists(pool, &old).await, "the quiet tenant keeps its history");
    service.stop().await;
}
