//! Episodes that are trajectories: their turns close together, whatever is being stored meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use event_log::event::{self, EpisodeEnd, Event, Feedback, Generation, Target, Value};
use ingest::reward::Unit;
use serde_json::json;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::{Builder, Uuid};

use crate::ingest_order::{hold_the_closer, release_the_closer};
use fixture::ingest::{Service, Trajectory, count, generation, send, stored, trajectory};
use fixture::session::with_sessions;
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(120);
const SOURCE: &str = "tests/episode";

pub fn in_session(episode_id: Uuid, number: u32, surface: &str) -> Generation {
    Generation {
        episode_id,
        turn: number,
        surface: surface.to_owned(),
        ..generation()
    }
}

pub fn about(target: Target, metric: &str, value: Value) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target,
        metric_name: metric.to_owned(),
        value,
        tags: BTreeMap::new(),
    };
    feedback.into_event("default", SOURCE, event::now())
}

pub fn end(episode_id: Uuid) -> Event {
    EpisodeEnd { episode_id }.into_event("default", SOURCE, event::now())
}

pub fn logged(turn: &Generation) -> Event {
    turn.clone().into_event("default", SOURCE)
}

/// The same, sampled at this time.
fn sampled_at(time: OffsetDateTime, turn: Generation, tenant: &str) -> Event {
    let milliseconds = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap();
    let random = turn.id.into_bytes()[6..].try_into().unwrap();
    let id = Builder::from_unix_timestamp_millis(milliseconds, &random).into_uuid();
    let mut event = Generation { id, ..turn }.into_event(tenant, SOURCE);
    event.time = time;
    event
}

fn id_of(event: &Event) -> Uuid {
    event.id.parse().unwrap()
}

/// How many transactions have written trajectories.
pub async fn transactions(pool: &PgPool) -> i64 {
    count(pool, "select count(distinct xmin::text) from trajectory").await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_after_an_episode_has_closed_is_late_and_another_tenant_is_another_episode() {
    let stack = Stack::start("late-turn").await;
    let service = Service::start_with(&stack, with_sessions()).await;
    let episode = Uuid::now_v7();
    let begin = event::now() - Duration::from_secs(60);
    let turn = |number: u32, after: u64, tenant| {
        let turn = in_session(episode, number, "patient");
        sampled_at(begin + Duration::from_secs(after), turn, tenant)
    };
    let events = [turn(0, 0, "default"), turn(1, 1, "default"), turn(0, 0, "other")];
    let [first, second, foreign] = [0, 1, 2].map(|nth: usize| id_of(&events[nth]));
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    send(&stack, &events).await;
    let mut thumb = about(Target::Episode(episode), "accept", Value::Bool(false));
    thumb.time = begin + Duration::from_secs(2);
    send(&stack, &[thumb]).await;
    stored(&stack.pool, 4).await;
    release_the_closer(&stack.pool).await;
    let rejected = Trajectory::rewarded(-0.25, "reject");
    for turn in [first, second] {
        assert_eq!(trajectory(&stack.pool, turn).await, rejected);
    }
    assert_eq!(
        trajectory(&stack.pool, foreign).await,
        Trajectory::censored("no_feedback")
    );

    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let late = turn(2, 10, "default");
    let late_id = id_of(&late);
    send(&stack, &[late]).await;
    stored(&stack.pool, 5).await;
    // The late turn is open, but its episode is not.
    let thumb = about(Target::Episode(episode), "accept", Value::Bool(true));
    let event::Body::Feedback(body) = &thumb.body else {
        panic!("feedback")
    };
    let question = json!({"id": body.id, "episode_id": episode, "metric_name": "accept", "value": true});
    let (status, answer) = service.post("/v1/feedback?dryrun=true", &question).await;
    assert_eq!(
        (status, &answer["dryrun"]["feedback"]),
        (200, &json!("late")),
        "{answer}"
    );
    let feedback = [
        thumb,
        about(Target::Generation(first), "kept", Value::Float(1.0)),
        about(Target::Generation(late_id), "kept", Value::Float(1.0)),
    ];
    send(&stack, &feedback).await;
    stored(&stack.pool, 8).await;
    release_the_closer(&stack.pool).await;
    assert_eq!(
        trajectory(&stack.pool, late_id).await,
        Trajectory::censored("late_turn")
    );
    let late_events: Vec<bool> = sqlx::query_scalar("select late from feedback order by id")
        .fetch_all(&stack.pool)
        .await
        .unwrap();
    assert_eq!(late_events, [false, true, true, false], "the late turn itself was open");
    for turn in [first, second] {
        assert_eq!(trajectory(&stack.pool, turn).await, rejected, "it is given once");
    }
    let alone = "select count(*) from trajectory where episode_id is null and episode_turns is null";
    assert_eq!(count(&stack.pool, alone).await, 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_waits_for_late_turns_unless_every_answer_of_its_rollout_is_stored() {
    let stack = Stack::start("complete-rollout").await;
    let service = Service::start_with(&stack, with_sessions()).await;
    let sql = "insert into run (kind, policy, line, status, config) values ('grpo', 'demo', 'run-x', 'running', '{}') returning id";
    let run: Uuid = sqlx::query_scalar(sql).fetch_one(&stack.pool).await.unwrap();
    let sql = "insert into task (run_id, id, prompt, answer) values ($1, 'task', '', '')";
    sqlx::query(sql).bind(run).execute(&stack.pool).await.unwrap();
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let ended_at = event::now() + Duration::from_secs(100);
    let mut count = 0;
    for (answers, waits_seconds) in [(1, 0), (2, 1)] {
        let rollout = Uuid::now_v7();
        let turn = in_session(rollout, 0, "session");
        let received: Vec<Uuid> = std::iter::once(turn.id)
            .chain(std::iter::repeat_with(Uuid::now_v7))
            .take(answers)
            .collect();
        let sql = "insert into rollout (id, run_id, task_id, group_id, draw, state, reward, answers) \
                   values ($1, $2, 'task', $1, 0, 'rewarded', 1, $3)";
        let row = sqlx::query(sql).bind(rollout).bind(run).bind(&received);
        row.execute(&stack.pool).await.unwrap();
        let end = Event {
            time: ended_at,
            ..end(rollout)
        };
        send(&stack, &[logged(&turn), end]).await;
        count += 2;
        stored(&stack.pool, count).await;
        let sql = "select closes_at from open_episode where episode_id = $1";
        let closes_at = eventually("its end has moved when it closes", SOON, async || {
            let at: OffsetDateTime = sqlx::query_scalar(sql)
                .bind(rollout)
                .fetch_one(&stack.pool)
                .await
                .unwrap();
            (at < ended_at + Duration::from_secs(60)).then_some(at)
        });
        assert_eq!(closes_at.await, ended_at + Duration::from_secs(waits_seconds));
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_trajectory_censors_what_is_open() {
    let stack = Stack::start("redefined").await;
    let as_generations = || {
        let mut options = with_sessions();
        for surface in &mut options.surface {
            (surface.trajectory, surface.turn_reward) = (Unit::Generation, None);
            surface.horizon_seconds = 4.0;
        }
        options
    };
    let mut as_episodes = with_sessions();
    as_episodes.surface[0].horizon_seconds = 4.0;
    let mut turns = Vec::new();
    for options in [as_generations(), as_episodes.clone(), as_generations()] {
        let service = Service::start_with(&stack, options).await;
        if turns.is_empty() {
            hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
        }
        let turn = in_session(Uuid::now_v7(), 0, "session");
        turns.push(turn.id);
        send(&stack, &[logged(&turn)]).await;
        stored(&stack.pool, turns.len() as i64).await;
        service.stop().await;
    }
    let service = Service::start_with(&stack, as_episodes).await;
    release_the_closer(&stack.pool).await;
    assert_eq!(
        trajectory(&stack.pool, turns[0]).await,
        Trajectory::censored("redefined")
    );
    assert_eq!(
        trajectory(&stack.pool, turns[1]).await,
        Trajectory::censored("no_feedback")
    );
    assert_eq!(
        trajectory(&stack.pool, turns[2]).await,
        Trajectory::censored("redefined")
    );
    service.stop().await;
    let turn = in_session(Uuid::now_v7(), 0, "session");
    let mut as_episodes = with_sessions();
    as_episodes.surface[0].horizon_seconds = 1.0;
    let service = Service::start_with(&stack, as_episodes).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    send(&stack, &[logged(&turn)]).await;
    stored(&stack.pool, 4).await;
    service.stop().await;
    let service = Service::start_with(&stack, as_generations()).await;
    release_the_closer(&stack.pool).await;
    assert_eq!(
        trajectory(&stack.pool, turn.id).await,
        Trajectory::censored("redefined")
    );
    assert_eq!(count(&stack.pool, "select count(*) from open_episode").await, 0);
    service.stop().await;
}

/// Stores turns of an episode that is due, without the sink.
async fn fill(pool: &PgPool, surface: &str, turns: i32) -> Uuid {
    let episode = Uuid::now_v7();
    for statement in [
        "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, \
             surface, episode_id, turn, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p, \
             finish_reason, declined, sampled_at, finished_at) \
         select uuidv7(), 'default', 'demo', 1, 1, '[[1, 1]]', '\\x00', 'realtime', 'replica-1', 'production', $2, $1, n, \
                'user', 'champion', 1, array[1], array[2], array[-0.5::real], 1, 1, 'stop', false, now(), now() \
         from generate_series(1, $3) n",
        "insert into open_generation (generation_id, surface, closes_at, episode_id) \
         select id, surface, now(), episode_id from generation where episode_id = $1 and surface = $2 and turn <= $3",
        "insert into feedback (id, tenant_id, generation_id, metric_name, value_text, given_at) \
         select uuidv7(), 'default', id, 'comment', repeat('x', 60000), finished_at from generation \
         where episode_id = $1 and surface = $2 and turn <= least($3, 1000) and turn % 2 = 0",
        "insert into feedback (id, tenant_id, episode_id, metric_name, value_bool, given_at) \
         select uuidv7(), 'default', $1, 'accept', true, min(finished_at) from generation \
         where episode_id = $1 and surface = $2 and $3 > 0",
        "insert into open_episode (tenant_id, episode_id, surface, turn_stored_at, closes_at, turns) \
         select 'default', $1, $2, now(), now(), $3 where $3 > 0",
    ] {
        let query = sqlx::query(statement).bind(episode).bind(surface).bind(turns);
        query.execute(pool).await.unwrap();
    }
    episode
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_turns_close_in_one_transaction_page_by_page() {
    let stack = Stack::start("thousand-turns").await;
    fill(&stack.pool, "session", 1_000).await;
    let mut options = with_sessions();
    // It reads texts of 64 KiB, so that a page has 16 turns.
    options.surface[0].turn_reward = Some("comment == null ? null : double(comment.size())".to_owned());
    options.surface[0].horizon_seconds = 1.0;
    let service = Service::start_with(&stack, options).await;
    let all = "select count(*) from trajectory where reward = 0.75 and episode_turns = 1000";
    eventually("all are closed", SOON, async || {
        (count(&stack.pool, all).await == 1_000).then_some(())
    })
    .await;
    assert_eq!(transactions(&stack.pool).await, 1);
    let own = "select count(*) from trajectory where turn_reward = 60000";
    assert_eq!(count(&stack.pool, own).await, 500);
    let left = "select (select count(*) from open_generation) + (select count(*) from open_episode)";
    assert_eq!(count(&stack.pool, left).await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_with_too_many_turns_is_censored_and_holds_no_other_up() {
    let stack = Stack::start("too-many-turns").await;
    fill(&stack.pool, "session", 4_097).await;
    let other = fill(&stack.pool, "session", 4_096).await;
    let mut options = with_sessions();
    options.surface[0].horizon_seconds = 1.0;
    let service = Service::start_with(&stack, options).await;
    let closed = "select count(*) from trajectory where closed_at is not null";
    eventually("all are closed", SOON, async || {
        (count(&stack.pool, closed).await == 8_193).then_some(())
    })
    .await;
    let codes = "select count(*) from trajectory where censor_code = 'too_many_turns' and episode_turns = 4097";
    assert_eq!(count(&stack.pool, codes).await, 4_097);
    let rewarded: i64 = sqlx::query_scalar("select count(*) from trajectory where episode_id = $1 and reward = 0.75")
        .bind(other)
        .fetch_one(&stack.pool)
        .await
        .unwrap();
    assert_eq!(rewarded, 4_096);
    assert_eq!(transactions(&stack.pool).await, 2);
    service.stop().await;
}

/// A part of the log that a sink reads elsewhere. The sink knows everything up to so many seconds from
/// now.
async fn add_partition(pool: &PgPool, partition: i32, ahead_seconds: f64) {
    let insert = "insert into consumer_offset (consumer, cluster_id, topic, partition, caught_up_to) \
                  select distinct consumer, cluster_id, topic, $1::int, now() + make_interval(secs => $2) \
                  from consumer_offset where consumer = 'sink' and topic like '%.generation.v1'";
    let inserted = sqlx::query(insert)
        .bind(partition)
        .bind(ahead_seconds)
        .execute(pool)
        .await;
    assert_eq!(inserted.unwrap().rows_affected(), 1);
}

/// Says that this sink has ended its transaction, and knows everything.
async fn remove_partition(pool: &PgPool, partition: i32) {
    let delete = "delete from consumer_offset where partition = $1";
    sqlx::query(delete).bind(partition).execute(pool).await.unwrap();
}

/// Announces that a transaction stores something about this id.
async fn announce(connection: &mut PgConnection, id: Uuid) {
    sqlx::query("select pg_advisory_xact_lock_shared(1, hashtext('default' || $1::uuid) & 4095)")
        .bind(id)
        .execute(connection)
        .await
        .unwrap();
}

/// Ids that do not share one of the 4,096 locks of announced ids.
async fn ids_with_own_locks<const N: usize>(pool: &PgPool) -> [Uuid; N] {
    loop {
        let ids = [(); N].map(|()| Uuid::now_v7());
        let locks = "select count(distinct hashtext('default' || id) & 4095) from unnest($1::uuid[]) id";
        let locks: i64 = sqlx::query_scalar(locks).bind(&ids[..]).fetch_one(pool).await.unwrap();
        if locks == N as i64 {
            return ids;
        }
    }
}

async fn closes_well(stack: &Stack, turn: Uuid) {
    assert_eq!(
        trajectory(&stack.pool, turn).await,
        Trajectory::rewarded(0.75, "accept")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_stays_open_while_a_sink_may_store_feedback_about_a_turn() {
    let stack = Stack::start("contested").await;
    let pool = &stack.pool;
    let service = Service::start_with(&stack, with_sessions()).await;
    hold_the_closer(pool, &stack.kafka.topics().generation).await;
    // Two other sinks. The first stores turns in a slow transaction. The second one begins a second
    // later, when these turns are still invisible to it.
    add_partition(pool, 997, 0.0).await;
    release_the_closer(pool).await;
    let mut first = edge::database::begin(pool).await.unwrap();
    sqlx::query("select now()").execute(&mut *first).await.unwrap();
    add_partition(pool, 998, 1.0).await;
    let [announced, other, first_episode, other_episode] = ids_with_own_locks(pool).await;
    let mut second = edge::database::begin(pool).await.unwrap();
    sqlx::query("select from consumer_offset where partition = 998 for update")
        .execute(&mut *second)
        .await
        .unwrap();
    announce(&mut second, announced).await;
    for (turn, episode) in [(announced, first_episode), (other, other_episode)] {
        for statement in [
            "insert into generation (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, \
                 purpose, surface, episode_id, turn, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, \
                 temperature, top_p, finish_reason, declined, sampled_at, finished_at) \
             select $1, 'default', 'demo', 1, 1, '[[1, 1]]', '\\x00', 'realtime', 'replica-1', 'production', 'session', $2, \
                    0, 'user', 'champion', 1, array[1], array[2], array[-0.5::real], 1, 1, 'stop', false, at, at \
             from (select now() - interval '10 seconds' as at) begun",
            "insert into open_generation (generation_id, surface, closes_at, episode_id) \
             select $1, 'session', now(), $2",
            "insert into feedback (id, tenant_id, episode_id, metric_name, value_bool, given_at) \
             select uuidv7(), 'default', episode_id, 'accept', true, finished_at from generation \
             where id = $1 and episode_id = $2",
            "insert into episode_end (tenant_id, episode_id, ended_at) \
             select 'default', episode_id, finished_at from generation where id = $1 and episode_id = $2",
            "insert into open_episode (tenant_id, episode_id, surface, turn_stored_at, closes_at) \
             select 'default', episode_id, surface, stored_at, stored_at from generation \
             where id = $1 and episode_id = $2",
        ] {
            let query = sqlx::query(statement).bind(turn).bind(episode);
            query.execute(&mut *first).await.unwrap();
        }
    }
    first.commit().await.unwrap();
    remove_partition(pool, 997).await;
    closes_well(&stack, other).await;
    assert_eq!(count(pool, "select count(*) from trajectory").await, 1);
    sqlx::query(
        "insert into feedback (id, tenant_id, generation_id, metric_name, value_float, given_at) \
         select uuidv7(), 'default', id, 'kept', 0.25, finished_at from generation where id = $1",
    )
    .bind(announced)
    .execute(&mut *second)
    .await
    .unwrap();
    second.commit().await.unwrap();
    remove_partition(pool, 998).await;
    closes_well(&stack, announced).await;
    let own: Option<f64> = sqlx::query_scalar("select turn_reward from trajectory where generation_id = $1")
        .bind(announced)
        .fetch_one(pool)
        .await
        .unwrap();
    assert_eq!(own, Some(0.25));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_transaction_of_anybody_else_keeps_no_episode_open() {
    let stack = Stack::start("foreign-transaction").await;
    let pool = &stack.pool;
    let [turn_id, episode] = ids_with_own_locks(pool).await;
    let mut foreign = edge::database::begin(pool).await.unwrap();
    sqlx::query("select pg_current_xact_id()")
        .execute(&mut *foreign)
        .await
        .unwrap();
    // Somebody's feedback about something that shares the turn's lock.
    announce(&mut foreign, turn_id).await;
    let service = Service::start_with(&stack, with_sessions()).await;
    let turn = Generation {
        id: turn_id,
        ..in_session(episode, 0, "session")
    };
    let thumb = about(Target::Episode(episode), "accept", Value::Bool(true));
    send(&stack, &[logged(&turn), thumb, end(episode)]).await;
    closes_well(&stack, turn_id).await;
    foreign.rollback().await.unwrap();
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_keeps_its_week_until_a_run_has_decided() {
    let stack = Stack::start("week-of-episode").await;
    let pool = &stack.pool;
    let run = "insert into run (id, kind, policy, line, status, config) \
               values (uuidv7(), 'realtime', 'demo', 'realtime', 'running', '{}')";
    sqlx::query(run).execute(pool).await.unwrap();
    fill(pool, "session", 3).await;
    let needed = async || -> Option<String> {
        let query = "select generations_needed(first_generation_id(now() + interval '1 day'))";
        sqlx::query_scalar(query).fetch_one(pool).await.unwrap()
    };
    assert_eq!(needed().await.as_deref(), Some("open"));
    let mut options = with_sessions();
    options.surface[0].horizon_seconds = 1.0;
    let service = Service::start_with(&stack, options).await;
    let all = "select count(*) from trajectory where reward = 0.75";
    eventually("all are closed", SOON, async || {
        (count(pool, all).await == 3).then_some(())
    })
    .await;
    service.stop().await;
    assert_eq!(needed().await.as_deref(), Some("queued"));
    let decided =
        "insert into disposition (generation_id, kind, code) select generation_id, 'dropped', 'stale' from trajectory";
    sqlx::query(decided).execute(pool).await.unwrap();
    assert_eq!(needed().await, None);
}
