//! Clocks that are wrong: a producer's, the sink's, the database's. None of them turns feedback
//! into a trajectory without a signal.

use std::time::Duration;

use event_log::event::{self, Event, Generation};
use ingest::reward::Definition;
use sqlx::{AssertSqlSafe, Executor};
use uuid::{NoContext, Timestamp, Uuid};

use fixture::ingest::{
    Service, Trajectory, accept, count, dead_letters, generation, no_dead_letters, options, send, trajectory,
};
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(90);
const SOURCE: &str = "tests/clock";
/// Long enough for feedback to arrive on a busy machine.
const HORIZON_SECONDS: f64 = 8.0;

fn patient() -> ingest::Options {
    ingest::Options {
        surface: vec![Definition {
            horizon_seconds: HORIZON_SECONDS,
            ..Definition::completion()
        }],
        ..options()
    }
}

/// A generation of a host whose clock is ahead by `seconds`.
fn generation_ahead(seconds: i64) -> (Uuid, Event) {
    let now = event::now() + time::Duration::seconds(seconds);
    let unix = Timestamp::from_unix(NoContext, now.unix_timestamp().cast_unsigned(), now.nanosecond());
    let id = Uuid::new_v7(unix);
    let generation = Generation {
        id,
        episode_id: id,
        ..generation()
    };
    let event = Event {
        time: now,
        ..generation.into_event("default", SOURCE)
    };
    (id, event)
}

/// An accept of the same host.
fn accept_ahead(id: Uuid, seconds: i64) -> Event {
    let event = accept(id, true);
    Event {
        time: event.time + time::Duration::seconds(seconds),
        ..event
    }
}

/// Waits until all partitions are caught up to a time at which these generations were stored.
async fn caught_up_with(stack: &Stack, ids: &[Uuid]) {
    let query = "select 1 where (select count(*) from generation where id = any($1)) = cardinality($1) \
                 and (select min(caught_up_to) > (select max(stored_at) + interval '0.2 s' from generation) \
                          and max(caught_up_to) <= now() \
                      from consumer_offset where consumer = 'sink')";
    eventually("the tables are caught up with the generations", SOON, async || {
        sqlx::query_scalar::<_, i32>(query)
            .bind(ids)
            .fetch_optional(&stack.pool)
            .await
            .unwrap()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_counts_although_its_hosts_clock_is_behind() {
    let stack = Stack::start("clock-behind").await;
    let service = Service::start_with(&stack, patient()).await;
    // Also the view of a sink whose clock is ahead by as much.
    let behind = [-3600, -240, -10];
    let (ids, events): (Vec<Uuid>, Vec<Event>) = behind.into_iter().map(generation_ahead).unzip();
    send(&stack, &events).await;
    caught_up_with(&stack, &ids).await;
    let feedback: Vec<Event> = ids
        .iter()
        .zip(behind)
        .map(|(id, ahead)| accept_ahead(*id, ahead))
        .collect();
    send(&stack, &feedback).await;
    for id in ids {
        assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_that_ended_by_a_clock_behind_waits_for_the_feedback_before_its_end() {
    let stack = Stack::start("clock-end").await;
    let options = ingest::Options {
        surface: vec![Definition {
            horizon_seconds: 3600.0,
            close_on_episode_end: true,
            ..Definition::completion()
        }],
        ..options()
    };
    let service = Service::start_with(&stack, options).await;
    let (id, event) = generation_ahead(-240);
    let ended_at = event.time + time::Duration::seconds(2);
    let end = event_log::event::EpisodeEnd { episode_id: id };
    let feedback = Event {
        time: event.time + time::Duration::seconds(1),
        ..accept(id, true)
    };
    // In the log before the end, but in the partition of another topic.
    send(
        &stack,
        &[event, feedback, end.into_event("default", "tests/end", ended_at)],
    )
    .await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_of_a_clock_that_ran_ahead_closes_nothing_once_the_clock_is_right() {
    let stack = Stack::start("clock-mark").await;
    Service::start_with(&stack, patient()).await.stop().await;
    sqlx::query("update consumer_offset set caught_up_to = now() + interval '1 year'")
        .execute(&stack.pool)
        .await
        .unwrap();
    let service = Service::start_with(&stack, patient()).await;
    let (id, event) = generation_ahead(0);
    send(&stack, &[event]).await;
    caught_up_with(&stack, &[id]).await;
    send(&stack, &[accept(id, true)]).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_host_a_year_ahead_are_put_aside_and_the_others_count() {
    let stack = Stack::start("clock-year").await;
    let service = Service::start_with(&stack, patient()).await;
    let year = 365 * 86_400;
    let (wrong, wrong_event) = generation_ahead(year);
    let (id, event) = generation_ahead(0);
    send(
        &stack,
        &[wrong_event, accept_ahead(wrong, year), event, accept(id, true)],
    )
    .await;
    for letter in dead_letters(&stack, 2).await {
        assert_eq!(letter.headers["reason"], "invalid");
        assert!(
            letter.headers["detail"].contains("lies in the future"),
            "{:?}",
            letter.headers
        );
    }
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::rewarded(0.75, "accept"));
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 1);
    service.stop().await;
}

/// Shadows the clock of the database in new connections: it is ahead by `skewed.clock.ahead`.
const SKEWED: &str = "create schema skewed; \
    create table skewed.clock (ahead interval not null); \
    insert into skewed.clock values ('0'); \
    create function skewed.clock_timestamp() returns timestamptz language sql volatile \
    as $$ select pg_catalog.clock_timestamp() + ahead from skewed.clock $$; \
    grant usage on schema skewed to springtide_ingest; \
    grant select on skewed.clock to springtide_ingest";

async fn set_clock(stack: &Stack, ahead: &str) {
    let sql = format!("update skewed.clock set ahead = '{ahead}'");
    stack.pool.execute(AssertSqlSafe(sql)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sink_reads_nothing_while_its_clock_and_the_databases_disagree() {
    let mut stack = Stack::start("clock-disagree").await;
    stack.pool.execute(SKEWED).await.unwrap();
    stack.database_url += "?options[search_path]=skewed,public,pg_catalog";
    let service = Service::start_with(&stack, patient()).await;
    let (right, event) = generation_ahead(0);
    send(&stack, &[event]).await;
    caught_up_with(&stack, &[right]).await;

    // Every event would seem to lie an hour in the future.
    set_clock(&stack, "-1 hour").await;
    eventually("the sink stops marking", SOON, async || {
        let marked = "select count(*) from consumer_offset where caught_up_to > now() - interval '3 s'";
        (count(&stack.pool, marked).await == 0).then_some(())
    })
    .await;
    let claims = "select sum(fence)::bigint from consumer_offset";
    let claimed = count(&stack.pool, claims).await;
    let (early, event) = generation_ahead(0);
    send(&stack, &[event, accept(early, true)]).await;
    assert_eq!(count(&stack.pool, "select count(*) from generation").await, 1);
    assert_eq!(
        count(&stack.pool, claims).await,
        claimed,
        "partitions were claimed again"
    );

    set_clock(&stack, "0").await;
    assert_eq!(
        trajectory(&stack.pool, early).await,
        Trajectory::rewarded(0.75, "accept")
    );
    no_dead_letters(&stack).await;
    service.stop().await;
}
