//! Retractions of feedback, and ends of episodes.

use std::time::Duration;

use event_log::event::{self, EpisodeEnd, Event, Generation, Retraction};
use ingest::reward::Definition;
use sqlx::PgPool;
use uuid::Uuid;

use fixture::ingest::{Service, Trajectory, accept, count, generation, options, send, trajectory};
use fixture::{Stack, eventually};

const SOON: Duration = Duration::from_secs(90);
const SOURCE: &str = "tests/revoke";

/// Retracts `feedback` now.
fn retract(feedback: &Event) -> Event {
    let retraction = Retraction {
        id: Uuid::now_v7(),
        feedback_id: feedback.id.parse().unwrap(),
        reason: "pressed by mistake".to_owned(),
    };
    retraction.into_event("default", SOURCE, event::now())
}

fn shown() -> Generation {
    Generation {
        decline_suppressed: false,
        exploration_share: None,
        sampling: None,
        untrainable: None,
        engine: None,
        proof: None,
        ..generation()
    }
}

/// Waits for the retraction and returns whether it is late.
async fn late(pool: &PgPool, feedback: &Event) -> bool {
    let id: Uuid = feedback.id.parse().unwrap();
    eventually("the retraction is stored", SOON, async || {
        sqlx::query_scalar("select late from retraction where feedback_id = $1")
            .bind(id)
            .fetch_optional(pool)
            .await
            .unwrap()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_that_is_retracted_in_time_has_no_effect() {
    let stack = Stack::start("taken-back").await;
    let service = Service::start(&stack).await;
    let (alone, changed) = (shown(), shown());
    let first = accept(alone.id, true);
    let mistake = accept(changed.id, true);
    let mut events = vec![retract(&first), first.clone()]; // the retraction comes first
    events.extend([mistake.clone(), retract(&mistake), accept(changed.id, false)]);
    let (alone_id, changed_id) = (alone.id, changed.id);
    events.extend([alone, changed].map(|generation| generation.into_event("default", SOURCE)));
    send(&stack, &events).await;

    assert_eq!(
        trajectory(&stack.pool, alone_id).await,
        Trajectory::censored("retracted")
    );
    let next = trajectory(&stack.pool, changed_id).await;
    assert_eq!(next, Trajectory::rewarded(-0.25, "reject"), "the next one decides");
    assert!(!late(&stack.pool, &first).await);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_that_is_retracted_too_late_still_counts() {
    let stack = Stack::start("taken-back-late").await;
    let service = Service::start(&stack).await;
    let generation = shown();
    let (id, feedback) = (generation.id, accept(generation.id, true));
    send(&stack, &[generation.into_event("default", SOURCE), feedback.clone()]).await;
    let closed = trajectory(&stack.pool, id).await;
    assert_eq!(closed, Trajectory::rewarded(0.75, "accept"));

    send(&stack, &[retract(&feedback)]).await;
    assert!(late(&stack.pool, &feedback).await);
    assert_eq!(trajectory(&stack.pool, id).await, closed);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retraction_of_late_feedback_is_late_too() {
    let stack = Stack::start("taken-back-waiting").await;
    let service = Service::start(&stack).await;
    let generation = shown();
    let (id, feedback) = (generation.id, accept(generation.id, true));
    send(&stack, &[generation.into_event("default", SOURCE), retract(&feedback)]).await;
    assert_eq!(trajectory(&stack.pool, id).await, Trajectory::censored("no_feedback"));
    assert!(
        !late(&stack.pool, &feedback).await,
        "its feedback may still come in time"
    );

    send(&stack, std::slice::from_ref(&feedback)).await;
    eventually("the feedback is stored", SOON, async || {
        (count(&stack.pool, "select count(*) from feedback where late").await == 1).then_some(())
    })
    .await;
    assert!(late(&stack.pool, &feedback).await);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_an_episode_closes_it_if_its_surface_says_so() {
    let stack = Stack::start("episode-end").await;
    let mut options = options();
    options.surface.push(Definition {
        name: "harness".to_owned(),
        horizon_seconds: 3600.0,
        close_on_episode_end: true,
        ..Definition::completion()
    });
    let service = Service::start_with(&stack, options).await;
    let (first, second) = (shown(), shown());
    let episode_id = Uuid::now_v7();
    let in_harness = |generation: Generation| Generation {
        episode_id,
        surface: "harness".to_owned(),
        ..generation
    };
    let (first_id, second_id) = (first.id, second.id);
    let acceptance = accept(first_id, true);
    let ended_at = acceptance.time;
    let end = |after| EpisodeEnd { episode_id }.into_event("default", format!("{SOURCE}/{after}"), ended_at + after);
    let mut unheard = accept(second_id, true);
    unheard.time = ended_at + time::Duration::milliseconds(1);
    let events = [
        in_harness(first).into_event("default", SOURCE),
        acceptance,
        end(time::Duration::ZERO),
        in_harness(second).into_event("default", SOURCE), // arrives after the end of its episode
        unheard,
        end(time::Duration::SECOND), // sent twice: the first counts
    ];
    send(&stack, &events).await;

    let rewarded = trajectory(&stack.pool, first_id).await;
    assert_eq!(rewarded, Trajectory::rewarded(0.75, "accept"));
    let second = trajectory(&stack.pool, second_id).await;
    assert_eq!(second, Trajectory::censored("no_feedback"));
    assert_eq!(count(&stack.pool, "select count(*) from episode_end").await, 1);
    service.stop().await;
}
