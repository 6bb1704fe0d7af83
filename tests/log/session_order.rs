//! Property: a session ends as a model says that knows no order, however its events arrive.
//!
//! Random sessions ([`crate::session_stories`]) are sent twice: once in the order of time, and once
//! shuffled with all others and with repetitions. Of some, a part comes after they have closed, which
//! changes nothing. [`crate::session_cases`] counts what they contain, and each case must occur.
//! `SPRINGTIDE_ORDER_STORIES=100000` runs more (`make fuzz NAME=order`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ingest_order::{
    BEGIN, Role, SEED, STORIES_AT_ONCE, StoryCopy, everything_closes, hold_the_closer, number, number_of_stories,
    options, release_the_closer, send_and_read,
};
use crate::session_cases::{Cases, Sent};
use crate::session_model::{as_logged, expected, late_row, logged, stored};
use crate::session_stories::{Action, RULES, Step, afterwards, session, surfaces};
use fixture::Stack;
use fixture::ingest::Service;

#[tokio::test(flavor = "multi_thread")]
async fn any_order_of_a_sessions_events_gives_what_the_model_says() {
    let stories = number_of_stories();
    let mut rng = StdRng::seed_from_u64(SEED);
    let (mut outcomes, mut cases) = (BTreeMap::new(), Cases::new());
    let (began, mut left) = (Instant::now(), stories);
    while left > 0 {
        let some = left.min(STORIES_AT_ONCE);
        run_sessions(some, &mut rng, &mut outcomes, &mut cases).await;
        left -= some;
    }
    let took = began.elapsed();
    println!("{stories} sessions, each sent twice, in {took:.0?}, by the outcomes of turns: {outcomes:?}");
    cases.print_all();
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
        "evaluation",
        "mixed_purposes",
        "mixed_surfaces",
        "mixed_policies",
        "not_shown",
    ] {
        assert!(outcomes.contains_key(kind), "no turn ended with {kind}: {outcomes:?}");
    }
}

/// A session as it is sent.
struct Story {
    copies: [StoryCopy; 2],
    /// What comes before it closes.
    steps: Vec<Step>,
    /// What comes after that.
    late: Vec<Step>,
}

impl Story {
    /// Of each four sessions, two come in time. Of the third, something comes after it has closed. Of
    /// the fourth, new events come then, and repetitions.
    fn new(nth: usize, begin: OffsetDateTime, rng: &mut StdRng) -> Self {
        let copies = [(); 2].map(|()| StoryCopy::new(begin, rng.random()));
        let mut steps = session(rng);
        let late = match nth % 4 {
            0 => {
                let mut late = afterwards(&steps);
                late.extend(answers(&steps));
                late.extend(steps.iter().filter(|_| rng.random_bool(0.3)).cloned());
                late
            }
            1 => delayed(&mut steps, rng),
            _ => Vec::new(),
        };
        Self { copies, steps, late }
    }

    /// Rows of `feedback` and `retraction` that say that they were late.
    fn late_roles(&self) -> BTreeSet<Role> {
        let known = |role: Role| self.steps.iter().any(|step| step.role() == role);
        let new = || self.late.iter().filter(|step| !known(step.role()));
        let feedback = new().filter(|step| matches!(step.action, Action::Feedback { .. }));
        let mut late: BTreeSet<Role> = feedback.map(Step::role).collect();
        let mut retractions = BTreeSet::new();
        for (step, comes_late) in self
            .steps
            .iter()
            .map(|step| (step, false))
            .chain(new().map(|step| (step, true)))
        {
            // A retraction is late if its feedback is, or if it came after the close.
            if let Action::Retraction { role, feedback } = step.action
                && (late.contains(&feedback) || comes_late && known(feedback))
            {
                retractions.insert(role);
            }
        }
        late.extend(retractions);
        late
    }
}

/// A second end, and a retraction of the first feedback, of a time at which they would have counted.
fn answers(steps: &[Step]) -> Vec<Step> {
    let mut answers = vec![Step {
        at: 0,
        action: Action::End { nth: 900 },
    }];
    let about_session = |step: &&Step| matches!(step.action, Action::Feedback { turn: None, .. });
    answers.extend(steps.iter().find(about_session).map(|given| Step {
        at: given.at,
        action: Action::Retraction {
            role: 903,
            feedback: given.role(),
        },
    }));
    answers
}

/// Takes some events out, which come late. Feedback about a turn that comes late stays: it is about
/// nothing yet.
fn delayed(steps: &mut Vec<Step>, rng: &mut StdRng) -> Vec<Step> {
    let first = steps[0].role();
    let is_turn = |step: &Step| matches!(step.action, Action::Turn(_));
    let late_turns: BTreeSet<Role> = steps
        .iter()
        .filter(|step| is_turn(step) && step.role() != first && rng.random_bool(0.2))
        .map(Step::role)
        .collect();
    let about_late: BTreeSet<Role> = steps
        .iter()
        .filter(|step| matches!(step.action, Action::Feedback { turn: Some(turn), .. } if late_turns.contains(&turn)))
        .map(Step::role)
        .collect();
    let (late, in_time) = steps.drain(..).partition(|step| match &step.action {
        Action::Turn(turn) => late_turns.contains(&turn.role),
        Action::Feedback { role, .. } => !about_late.contains(role) && rng.random_bool(0.3),
        Action::Retraction { feedback, .. } => !about_late.contains(feedback) && rng.random_bool(0.3),
        Action::End { .. } => rng.random_bool(0.3),
    });
    *steps = in_time;
    late
}

async fn run_sessions(stories: usize, rng: &mut StdRng, outcomes: &mut BTreeMap<String, usize>, cases: &mut Cases) {
    let stack = Stack::start("sessions").await;
    let options = ingest::Options {
        surface: surfaces(RULES),
        ..options()
    };
    let service = Service::start_with(&stack, options).await;
    hold_the_closer(&stack.pool, &stack.kafka.topics().generation).await;
    let begin = OffsetDateTime::now_utc() - BEGIN;
    let begin = begin.replace_nanosecond(0).unwrap();
    let stories: Vec<Story> = (0..stories).map(|nth| Story::new(nth, begin, rng)).collect();
    let (mut in_order, mut shuffled, mut too_late) = (Vec::new(), Vec::new(), Vec::new());
    for (nth, story) in stories.iter().enumerate() {
        let mut by_time: Vec<&Step> = story.steps.iter().collect();
        by_time.sort_by_key(|step| step.at);
        in_order.extend(by_time.iter().map(|step| story.copies[0].event_of_session(step)));
        let again = story.steps.iter().filter(|_| rng.random_bool(0.3));
        shuffled.extend(story.steps.iter().chain(again).map(|step| (nth, step)));
        for copy in story.copies {
            too_late.extend(story.late.iter().map(|step| copy.event_of_session(step)));
        }
    }
    shuffled.shuffle(rng);
    too_late.shuffle(rng);
    let mut arrivals: Vec<Vec<Role>> = vec![Vec::new(); stories.len()];
    let mut copies = Vec::with_capacity(shuffled.len());
    for (nth, step) in shuffled {
        arrivals[nth].push(step.role());
        copies.push(stories[nth].copies[1].event_of_session(step));
    }
    let mut sent = 0;
    send_and_read(&stack, &[&in_order, &copies], &mut sent).await;
    release_the_closer(&stack.pool).await;
    everything_closes(&stack.pool).await;
    // Too late by their arrival: they change nothing.
    send_and_read(&stack, &[&too_late], &mut sent).await;
    everything_closes(&stack.pool).await;

    let (found, logged) = (stored(&stack.pool, begin).await, logged(&stack.pool).await);
    let late_rows: Vec<Uuid> =
        sqlx::query_scalar("select id from feedback where late union all select id from retraction where late")
            .fetch_all(&stack.pool)
            .await
            .unwrap();
    let late_rows: BTreeSet<Uuid> = late_rows.into_iter().collect();
    let mut late_expected = BTreeSet::new();
    let mut rows_expected = 0;
    for (story, arrival) in stories.iter().zip(&arrivals) {
        let Story { copies, steps, late } = story;
        let mut rows = expected(steps, RULES);
        let turns = |steps: &[Step]| -> Vec<(i64, crate::session_stories::Turn)> {
            let turn = |step: &Step| match &step.action {
                Action::Turn(turn) => Some((step.at, turn.clone())),
                _ => None,
            };
            steps.iter().filter_map(turn).collect()
        };
        cases.count(&Sent {
            steps,
            late,
            arrival,
            rows: &rows,
        });
        for (at, turn) in turns(late) {
            rows.entry(turn.role).or_insert_with(|| late_row(at));
        }
        rows_expected += 2 * rows.len();
        for copy in copies {
            for (role, row) in &rows {
                assert_eq!(
                    found.get(&copy.id(*role)),
                    Some(row),
                    "turn {role} of {steps:#?}, late: {late:#?}"
                );
            }
            for (_, turn) in turns(steps).into_iter().chain(turns(late)) {
                assert_eq!(logged.get(&copy.id(turn.role)), Some(&as_logged(&turn)));
            }
            for role in story.late_roles() {
                let id = copy.id(role);
                assert!(late_rows.contains(&id), "{role} is late: {steps:#?}, late: {late:#?}");
                late_expected.insert(id);
            }
        }
    }
    assert_eq!(late_rows, late_expected, "nothing else was late");
    assert_eq!(
        (found.len(), logged.len()),
        (rows_expected, rows_expected),
        "each turn has one row"
    );
    // One transaction closes an episode.
    let split = "select count(*) from (select from trajectory where episode_id is not null group by episode_id \
                 having count(distinct (reward, censor_code, signal, feedback_at, closes_at, closed_at)) > 1 \
                     or count(distinct xmin::text) > 1 or count(*) <> min(episode_turns)) as split";
    assert_eq!(number(&stack.pool, split).await, 0, "episodes are whole");
    for row in found.into_values() {
        let kind = row.signal.or(row.code).unwrap();
        *outcomes.entry(kind).or_default() += 1;
    }
    service.stop().await;
}
