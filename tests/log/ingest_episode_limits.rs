//! What bounds an episode: how many turns it takes, and what becomes of further ones.

use std::time::Duration;

use event_log::event::{Target, Value};
use sqlx::{PgPool, Row};
use uuid::Uuid;

use crate::ingest_episode::{about, end, in_session, logged};
use crate::ingest_order::{hold_the_closer, release_the_closer};
use fixture::ingest::{Service, Trajectory, count, send, stored, trajectory};
use fixture::session::with_sessions;
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(120);

/// Stores turns on the surface `session`, without the sink, that began this many seconds ago.
async fn store_turns(pool: &PgPool, episode: Uuid, turns: i32, seconds_ago: f64) {
    let store = "with stored as ( \
             insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, \
                 purpose, surface, episode_id, turn, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, \
                 temperature, top_p, finish_reason, declined, sampled_at, finished_at) \
             select uuidv7(), 'default', 'demo', 1, 1, '[[1, 1]]', '\\x00', 'realtime', 'replica-1', 'production', 'session', \
                    $1, n, 'user', 'champion', 1, array[1], array[2], array[-0.5::real], 1, 1, 'stop', false, at, at \
             from generate_series(1, $2) n, (select now() - make_interval(secs => $3) as at) begun \
             returning id, surface, episode_id \
         ) \
         insert into open_generation (generation_id, surface, closes_at, episode_id) \
         select id, surface, now(), episode_id from stored";
    let store = sqlx::query(store).bind(episode).bind(turns).bind(seconds_ago);
    store.execute(pool).await.unwrap();
}

/// Makes the closer look at the episode in so many seconds.
async fn open_episode(pool: &PgPool, episode: Uuid, seconds: f64) {
    let open = "insert into open_episode (tenant_id, episode_id, surface, turn_stored_at, closes_at, turns) \
                select 'default', $1, 'session', now(), now() + make_interval(secs => $2), count(*) \
                from open_generation where episode_id = $1";
    let open = sqlx::query(open).bind(episode).bind(seconds);
    open.execute(pool).await.unwrap();
}

/// Says that the episode ended so many seconds ago, and well.
async fn ended(pool: &PgPool, episode: Uuid, seconds_ago: f64) {
    for statement in [
        "insert into episode_end (tenant_id, episode_id, ended_at) \
         values ('default', $1, now() - make_interval(secs => $2))",
        "insert into feedback (id, tenant_id, episode_id, metric_name, value_bool, given_at) \
         values (uuidv7(), 'default', $1, 'accept', true, now() - make_interval(secs => $2 + 1))",
    ] {
        let query = sqlx::query(statement).bind(episode).bind(seconds_ago);
        query.execute(pool).await.unwrap();
    }
}

async fn nothing_is_open(pool: &PgPool) {
    let open = "select count(*) from open_generation";
    eventually("everything closes", SOON, async || {
        (count(pool, open).await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_episode_is_never_closed_again_however_many_turns_come_later() {
    let stack = Stack::start("late-turns").await;
    let pool = &stack.pool;
    let episode = Uuid::now_v7();
    store_turns(pool, episode, 2, 7_200.0).await;
    ended(pool, episode, 7_190.0).await;
    open_episode(pool, episode, 0.0).await;
    let service = Service::start_with(&stack, with_sessions()).await;
    let closed = "select count(*) from trajectory where reward = 0.75 and episode_turns = 2";
    eventually("it closes", SOON, async || {
        (count(pool, closed).await == 2).then_some(())
    })
    .await;
    service.stop().await;
    // More than fit into one transaction.
    store_turns(pool, episode, 9_000, 3_600.0).await;
    open_episode(pool, episode, 0.0).await;
    let service = Service::start_with(&stack, with_sessions()).await;
    nothing_is_open(pool).await;
    service.stop().await;
    let late = "select count(*) from trajectory where censor_code = 'late_turn' and episode_id is null";
    assert_eq!(count(pool, late).await, 9_000);
    assert_eq!(count(pool, closed).await, 2);
    assert_eq!(count(pool, "select count(*) from trajectory").await, 9_002);
    // Feedback finds out that it is late without reading all of them.
    let plan = "explain (analyze, buffers, format json) select episode_feedback_late('default', $1)";
    let plan: serde_json::Value = sqlx::query(plan).bind(episode).fetch_one(pool).await.unwrap().get(0);
    let pages = plan[0]["Plan"]["Shared Hit Blocks"].as_u64().unwrap()
        + plan[0]["Plan"]["Shared Read Blocks"].as_u64().unwrap();
    assert!(pages < 5_000, "{plan:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_came_too_late_do_not_make_an_episode_too_long() {
    let stack = Stack::start("late-do-not-count").await;
    let pool = &stack.pool;
    let episode = Uuid::now_v7();
    store_turns(pool, episode, 4_000, 7_200.0).await;
    ended(pool, episode, 7_190.0).await;
    store_turns(pool, episode, 200, 3_600.0).await;
    open_episode(pool, episode, 0.0).await;
    let service = Service::start_with(&stack, with_sessions()).await;
    nothing_is_open(pool).await;
    service.stop().await;
    let rewarded = "select count(*) from trajectory where reward = 0.75 and episode_turns = 4000";
    assert_eq!(count(pool, rewarded).await, 4_000);
    let late = "select count(*) from trajectory where censor_code = 'late_turn' and episode_id is null";
    assert_eq!(count(pool, late).await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_closes_with_one_turn_too_many_and_its_further_turns_wait_for_nothing() {
    let stack = Stack::start("one-too-many").await;
    let pool = &stack.pool;
    let episode = Uuid::now_v7();
    store_turns(pool, episode, 4_096, 60.0).await;
    open_episode(pool, episode, 3_600.0).await;
    let service = Service::start_with(&stack, with_sessions()).await;
    let last = in_session(episode, 4_097, "session");
    send(&stack, &[logged(&last)]).await;
    assert_eq!(trajectory(pool, last.id).await, Trajectory::censored("too_many_turns"));
    let closed = "select count(*) from trajectory where censor_code = 'too_many_turns' and episode_turns = 4097";
    assert_eq!(count(pool, closed).await, 4_097);

    let mut holder = edge::database::begin(pool).await.unwrap();
    let held = sqlx::query("select from open_episode where episode_id = $1 and turns = 0 for update")
        .bind(episode)
        .execute(&mut *holder)
        .await;
    assert_eq!(held.unwrap().rows_affected(), 1);
    let further = in_session(episode, 4_098, "session");
    let thumb = about(Target::Episode(episode), "accept", Value::Bool(true));
    send(&stack, &[logged(&further), thumb, end(episode)]).await;
    assert_eq!(trajectory(pool, further.id).await, Trajectory::censored("late_turn"));
    stored(pool, 4).await;
    assert_eq!(count(pool, "select count(*) from feedback where late").await, 1);
    holder.rollback().await.unwrap();
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_takes_no_more_turns_than_can_be_read_while_nothing_closes() {
    let stack = Stack::start("full-episode").await;
    let pool = &stack.pool;
    let episode = Uuid::now_v7();
    let [first, second, third] = [0, 1, 2].map(|number| in_session(episode, number, "session"));
    let service = Service::start_with(&stack, with_sessions()).await;
    hold_the_closer(pool, &stack.kafka.topics().generation).await;
    send(&stack, &[logged(&first)]).await;
    stored(pool, 1).await;
    // As if there were many.
    let many = "update open_episode set turns = 8192 where turns = 1";
    assert_eq!(sqlx::query(many).execute(pool).await.unwrap().rows_affected(), 1);
    for (turn, records) in [(&second, 2), (&third, 3)] {
        send(&stack, &[logged(turn)]).await;
        stored(pool, records).await;
    }
    let turns: Vec<(Uuid, bool)> = sqlx::query_as(
        "select o.generation_id, o.stray from open_generation o join generation g on g.id = o.generation_id order by g.turn",
    )
    .fetch_all(pool)
    .await
    .unwrap();
    assert_eq!(turns, [(first.id, false), (second.id, false), (third.id, true)]);
    assert_eq!(
        count(pool, "select count(*) from open_episode where turns = 8193").await,
        1
    );
    release_the_closer(pool).await;
    for turn in [&first, &second] {
        assert_eq!(trajectory(pool, turn.id).await, Trajectory::censored("too_many_turns"));
    }
    assert_eq!(trajectory(pool, third.id).await, Trajectory::censored("late_turn"));
    service.stop().await;
}
