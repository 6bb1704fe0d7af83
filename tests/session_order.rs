//! Property: a session ends as a model says that knows no order, however its events arrive.
//!
//! Random sessions ([`crate::session_stories`]) are sent twice: once in order, and once shuffled with
//! all others and with repetitions. Some get events after they have closed, which change nothing.
//! `SPRINGTIDE_ORDER_STORIES=100000` runs more (`make property-order`).

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ingest::Service;
use crate::ingest_order::{
    BEGIN, SEED, STORIES_AT_ONCE, StoryCopy, everything_closes, hold_the_closer, number, number_of_stories, options,
    release_the_closer, send_and_read,
};
use crate::session_model::{expected, late_row, stored};
use crate::session_stories::{RULES, afterwards, session, surfaces};
use crate::support::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn any_order_of_a_sessions_events_gives_what_the_model_says() {
    let stories = number_of_stories();
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut outcomes: BTreeMap<String, usize> = BTreeMap::new();
    let mut left = stories;
    while left > 0 {
        let some = left.min(STORIES_AT_ONCE);
        run_sessions(some, &mut rng, &mut outcomes).await;
        left -= some;
    }
    println!("{stories} sessions, each sent twice, by the outcomes of turns: {outcomes:?}");
    for kind in [
        "accept",
        "reject",
        "decline",
        "value",
        "expression",
        "no_feedback",
        "retracted",
        "late_turn",
        "no_consent",
        "mixed_surfaces",
        "mixed_policies",
        "not_shown",
    ] {
        assert!(outcomes.contains_key(kind), "no turn ended with {kind}: {outcomes:?}");
    }
}

async fn run_sessions(stories: usize, rng: &mut StdRng, outcomes: &mut BTreeMap<String, usize>) {
    let stack = Stack::start("sessions").await;
    let options = ingest::Options {
        surface: surfaces(RULES),
        ..options()
    };
    let service = Service::start_with(&stack, options).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let begin = OffsetDateTime::now_utc() - BEGIN;
    let begin = begin.replace_nanosecond(0).unwrap();
    let (mut in_order, mut shuffled, mut too_late) = (Vec::new(), Vec::new(), Vec::new());
    let mut sessions = Vec::new();
    for nth in 0..stories {
        let steps = session(rng);
        let copies = [(); 2].map(|()| StoryCopy::new(begin, rng.random()));
        in_order.extend(steps.iter().map(|step| copies[0].event_of_session(step)));
        shuffled.extend(steps.iter().map(|step| copies[1].event_of_session(step)));
        let again = steps.iter().filter(|_| rng.random_bool(0.3));
        shuffled.extend(again.map(|step| copies[1].event_of_session(step)));
        let late = if nth % 4 == 0 { afterwards(&steps) } else { Vec::new() };
        for copy in copies {
            too_late.extend(late.iter().map(|step| copy.event_of_session(step)));
        }
        sessions.push((copies, steps, late));
    }
    shuffled.shuffle(rng);
    too_late.shuffle(rng);
    let mut sent = 0;
    send_and_read(&stack, &[&in_order, &shuffled], &mut sent).await;
    release_the_closer(&stack.pool).await;
    everything_closes(&stack.pool).await;
    // Too late by their arrival: they change nothing.
    send_and_read(&stack, &[&too_late], &mut sent).await;
    everything_closes(&stack.pool).await;

    let found = stored(&stack.pool, begin).await;
    let late_rows: Vec<Uuid> =
        sqlx::query_scalar("select id from feedback where late union all select id from retraction where late")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    let mut late_expected = 0;
    let mut rows_expected = 0;
    for (copies, steps, late) in &sessions {
        let mut rows = expected(steps, RULES);
        for step in late.iter().filter(|step| !step.is_feedback()) {
            rows.insert(step.role(), late_row(step.at));
        }
        rows_expected += 2 * rows.len();
        for copy in copies {
            for (role, row) in &rows {
                assert_eq!(found.get(&copy.id(*role)), Some(row), "turn {role} of {steps:#?}");
            }
            for step in late.iter().filter(|step| step.is_feedback()) {
                late_expected += 1;
                assert!(
                    late_rows.contains(&copy.id(step.role())),
                    "{step:?} is late: {steps:#?}"
                );
            }
        }
    }
    assert_eq!(late_rows.len(), late_expected, "nothing else was late");
    assert_eq!(found.len(), rows_expected, "each turn has one row");
    // One transaction closes an episode.
    let split = "select count(*) from (select from trajectory where episode_id is not null group by episode_id \
                 having count(distinct (reward, censor_code, signal, feedback_at, closes_at, closed_at)) > 1 \
                     or count(*) <> min(episode_turns)) as split";
    assert_eq!(number(&stack.pool, split).await, 0, "episodes are whole");
    for row in found.into_values() {
        let kind = row.signal.or(row.code).unwrap();
        *outcomes.entry(kind).or_default() += 1;
    }
    service.stop().await;
}
